"""Words: a text on the screen while it grows."""

from __future__ import annotations

from rich.console import Console


class Words:
    """A text that is printed word by word, in lines that start with `indent` spaces."""

    def __init__(self, console: Console, *, indent: int) -> None:
        self._console = console
        self._indent = indent
        self._column = 0
        self._shown = 0

    def show(self, text: str, *, last: bool = False) -> None:
        """Print what is new of the text; unless it is the `last` of it, without the last word,
        which may be half of one."""
        words = text.split()
        whole = len(words) if last else len(words) - 1
        for word in words[self._shown : whole]:
            self._print(word)
        self._shown = max(self._shown, whole)
        if last:
            self.end()

    def end(self) -> None:
        """End the line."""
        self._console.print()

    def _print(self, word: str) -> None:
        begin = " "
        if self._column == 0 or self._column + 1 + len(word) > self._console.width:
            begin = ("\n" if self._column else "") + " " * self._indent
            self._column = self._indent - 1
        self._column += 1 + len(word)
        self._console.print(f"{begin}{word}", end="", markup=False, highlight=False, soft_wrap=True)
