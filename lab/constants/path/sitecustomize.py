"""Python imports this first in a process with this folder on its path; see `lab.constants`."""

from lab.constants import change_on_import

change_on_import()
