"""Draws the ledger of a pass as one HTML file, which needs no network and runs no script."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ms_data.errors import OutputError, SettingError
from ms_data.files.durable import write_file
from ms_data.files.untrusted import check_path
from ms_data.passes.ledger import Findings, read_findings
from ms_data.passes.record import PassRecord, read_record
from ms_data.passes.tally import ReasonTally

_STYLE = Path(__file__).with_name("page.css")
_FILES = 20
_BINS = 24


def draw_stats(folder: str | Path, *, out: str | Path) -> None:
    """Draw what `clean` or `dedup` made of a corpus, as one page.

    Args:
        folder: what `clean` or `dedup` wrote.
        out: the HTML file to write.

    Raises:
        SettingError: the folder holds no ledger, or a damaged one.
        OutputError: the file cannot be written.
    """
    check_path("folder", folder, error=SettingError)
    check_path("out", out, error=OutputError, written="file")
    record = read_record(Path(folder))
    write_file(Path(out), render(record, read_findings(Path(folder), record), str(folder)).encode())


def render(record: PassRecord, findings: Findings, name: str) -> str:
    """Return the page of a record."""
    tally = record.tally
    parts = {
        "kept": tally.kept,
        "dropped": tally.dropped_documents,
        "quarantined": tally.quarantined,
    }
    dropped = sum(one.size_bytes for one in tally.dropped.values())
    taken = sum(one.size_bytes for one in tally.changed.values())
    sizes = {"kept": tally.bytes_out, "dropped": dropped, "changed": max(0, taken)}
    body = [
        f"<h1>{_safe(name)}</h1><p class=soft>ms-data {_safe(record.kind)}: what became of "
        f"{tally.documents:,} documents</p>",
        _tiles(record, dropped, taken),
        _card("Documents", _flow(parts)),
        _card("Bytes", _flow(sizes, unit="bytes")),
        _reasons("Documents dropped, by rule and setting", tally.dropped, "dropped", "documents"),
        _reasons("Parts cut or masked", tally.cuts, "changed", "parts"),
        _reasons("Documents kept with changes, and bytes taken away", tally.changed, "changed"),
        _plots(findings),
        _files(findings),
        _quarantine(findings),
        _recipe(record),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(name)}</title><style>{_STYLE.read_text('utf-8')}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _tiles(record: PassRecord, dropped: int, taken: int) -> str:
    tally = record.tally
    shown = {
        "documents in": f"{tally.documents:,}",
        "kept": f"{tally.kept:,} ({_share(tally.kept, tally.documents)})",
        "dropped": f"{tally.dropped_documents:,}",
        "quarantined": f"{tally.quarantined:,}",
        **({"without text, no documents": f"{record.empty:,}"} if record.empty else {}),
        "in": _bytes(tally.bytes_in),
        "kept as text": _bytes(tally.bytes_out),
        "dropped with documents": _bytes(dropped),
        "taken out of what is kept": _bytes(taken),
    }
    tiles = (
        f"<div class=tile><b>{value}</b><span>{name}</span></div>" for name, value in shown.items()
    )
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _flow(parts: Mapping[str, int], unit: str = "") -> str:
    total = sum(parts.values()) or 1
    bars = "".join(
        f'<i class={name} style="width:{100 * value / total:.3f}%"></i>'
        for name, value in parts.items()
        if value
    )
    legend = "".join(
        f"<span><i class={name}></i>{name} {_bytes(value) if unit else f'{value:,}'} "
        f"({_share(value, total)})</span>"
        for name, value in parts.items()
    )
    return f"<div class=flow>{bars}</div><div class=legend>{legend}</div>"


def _reasons(
    title: str, tallies: Mapping[str, ReasonTally], kind: str, counted: str = "documents"
) -> str:
    if not tallies:
        return ""
    ordered = sorted(tallies.items(), key=lambda one: (-one[1].documents, one[0]))
    most = ordered[0][1].documents or 1
    rows = "".join(
        f"<tr><td>{_examples(reason, one)}</td><td class=n>{one.documents:,}</td>"
        f"<td class=n>{_bytes(one.size_bytes)}</td><td class=bar><div><i class={kind} "
        f'style="width:{100 * one.documents / most:.2f}%"></i></div></td></tr>'
        for reason, one in ordered
    )
    head = f"<th>reason<th class=n>{counted}<th class=n>bytes<th class=bar>"
    return _card(title, _table(head, rows))


def _examples(reason: str, tally: ReasonTally) -> str:
    shown = "".join(
        f"<p><code>{_safe(one.place)}</code>{_value(one.value)}<br><q>{_safe(one.excerpt)}</q></p>"
        for one in tally.examples
    )
    name = f"<code>{_breakable(reason)}</code>"
    return f"<details><summary>{name}</summary>{shown}</details>" if shown else name


def _value(value: object) -> str:
    return "" if value is None else f" found {_safe(_number(value))}"


def _plots(findings: Findings) -> str:
    plots = [
        f"<div><h3>{_breakable(reason)}</h3>{_histogram(one.bins(_BINS), one.limit)}</div>"
        for reason, one in sorted(findings.values.items())
        if one.count > 1
    ]
    if not plots:
        return ""
    note = "<p class=soft>What rules found in the documents that they dropped.</p>"
    return _card("Values", f"{note}<div class=plots>{''.join(plots)}</div>")


def _histogram(bins: Sequence[tuple[float, int]], limit: float | None) -> str:
    most = max(count for _, count in bins)
    width = 300 / len(bins)
    bars = "".join(
        f'<rect x="{at * width:.1f}" y="{90 - 80 * count / most:.1f}" width="{width - 1:.1f}" '
        f'height="{80 * count / most:.1f}" fill="var(--dropped)"/>'
        for at, (_, count) in enumerate(bins)
        if count
    )
    ends = f'<text x="0" y="102">{_number(bins[0][0])}</text>'
    if len(bins) > 1:
        ends += f'<text x="300" y="102" text-anchor="end">{_number(bins[-1][0])}</text>'
    asked = (
        ""
        if limit is None
        else f'<text x="150" y="102" text-anchor="middle">limit {limit:g}</text>'
    )
    return f'<svg viewBox="0 0 300 106" role="img">{bars}{ends}{asked}</svg>'


def _files(findings: Findings) -> str:
    if len(findings.files) < 2:
        return ""
    rows = "".join(
        f"<tr><td><code>{_safe(name)}</code></td><td class=n>{counts.total():,}</td>"
        f"<td class=n>{counts['kept']:,}</td><td class=n>{counts['dropped']:,}</td></tr>"
        for name, counts in _largest(findings.files)
    )
    head = "<th>file<th class=n>documents<th class=n>kept<th class=n>dropped"
    return _card(f"Files with most documents, of {len(findings.files):,}", _table(head, rows))


def _largest(files: Mapping[str, Counter[str]]) -> Iterable[tuple[str, Counter[str]]]:
    return sorted(files.items(), key=lambda one: (-one[1].total(), one[0]))[:_FILES]


def _quarantine(findings: Findings) -> str:
    rows = "".join(f"<p><code>{_safe(one)}</code></p>" for one in findings.quarantined)
    return _card("Documents that cannot be read", rows) if rows else ""


def _recipe(record: PassRecord) -> str:
    rows = "".join(
        f"<tr><td>{_safe(name)}</td><td><code>{_safe(value)}</code></td></tr>"
        for name, value in record.recipe.items()
    )
    return _card("Settings", f"<details><summary>all</summary>{_table('', rows)}</details>")


def _card(title: str, content: str) -> str:
    return f"<section class=card><h2>{title}</h2>{content}</section>"


def _table(head: str, rows: str) -> str:
    heading = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div class=scroll><table>{heading}<tbody>{rows}</tbody></table></div>"


def _safe(value: object) -> str:
    return html.escape(str(value))


def _breakable(reason: str) -> str:
    """Let a name be broken into lines behind each of its parts."""
    return _safe(reason).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,} B"
