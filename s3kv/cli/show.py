"""Results as tables for a terminal. What is in a bucket is printed as text, never as markup."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from s3kv.cli.doctor.findings import Finding, Status
from s3kv.cli.inspection import Inspection
from s3kv.cli.statistics import TensorStatistics
from s3kv.cli.usage import AGES, DAY_S, HOUR_S, NamespaceUsage

_STYLES: dict[Status, str] = {
    "ok": "green",
    "warning": "yellow",
    "fault": "bold red",
    "skipped": "dim",
}


def findings(found: Sequence[Finding]) -> None:
    """One line for each, with its remedy beneath."""
    table = Table.grid(padding=(0, 2))
    for finding in found:
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", "bold" if finding.status != "ok" else "dim")
        table.add_row(Text(finding.status, _STYLES[finding.status]), finding.check, detail)
    Console().print(table)


def usage(usages: Sequence[NamespaceUsage], now_s: float) -> None:
    """Namespaces, then how old their bytes are."""
    table = Table("namespace", "model", box=None)
    for name in ("objects", "bytes", "oldest", "newest"):
        table.add_column(name, justify="right")
    for one in usages:
        table.add_row(
            one.digest,
            Text(one.model or "–"),
            f"{one.objects:,}",
            size(one.nbytes),
            age(now_s - one.oldest_s),
            age(now_s - one.newest_s),
        )
    total = sum(one.nbytes for one in usages)
    table.add_row("total", "", f"{sum(one.objects for one in usages):,}", size(total), "", "")
    console = Console()
    console.print(table)
    histogram = Table("last written", box=None)
    histogram.add_column("bytes", justify="right")
    histogram.add_column("")
    for at, (name, _) in enumerate(AGES):
        nbytes = sum(one.bytes_by_age[at] for one in usages)
        histogram.add_row(name, size(nbytes), "█" * round(40 * nbytes / max(total, 1)))
    console.print(histogram)


def inspection(found: Inspection) -> None:
    """The header, the tensors, and the verdict."""
    console = Console()
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # a key is there to be copied
    table.add_row("key", Text(found.key))
    table.add_row("bytes", f"{found.nbytes:,}")
    header = found.header
    if header is not None:
        table.add_row("namespace", Text(header.namespace_digest))
        table.add_row("group, shard", Text(f"{header.group}, {header.shard}"))
        table.add_row("block hash", header.block_hash.hex())
        table.add_row("digest", Text(f"{header.algorithm} {header.digest}"))
        for tensor in header.tensors:
            table.add_row("tensor", Text(f"{tensor.name}  {tensor.dtype} {list(tensor.shape)}"))
    for one in found.statistics or ():
        table.add_row("numbers", Text(f"{one.name}  {_numbers(one)}"))
    if found.refusal is None:
        verdict = Text("it is the object its key names", "green")
    else:
        verdict = Text(f"refused: {found.refusal}. To an engine it is a miss", "bold red")
        if found.refusal == "algorithm":
            verdict.append("\n→ give --set integrity=… as the engines of this namespace have it")
    table.add_row("verdict", verdict)
    console.print(table)


def _numbers(one: TensorStatistics) -> str:
    told = "nothing finite"
    if one.mean is not None:
        told = f"{one.least:g} to {one.most:g}, mean {one.mean:g}"
    return f"{told}; {one.nans:,} NaN, {one.infinite:,} infinite"


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit of which there is one."""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def age(seconds: float) -> str:
    """An age in minutes, hours or days."""
    if seconds < HOUR_S:
        return f"{max(seconds, 0.0) / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} d"
