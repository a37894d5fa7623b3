"""Renders the ledger of a run as one self-contained HTML file without scripts."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ms_data.errors import OutputError, SettingError
from ms_data.files.durable import write_file
from ms_data.files.untrusted import check_path
from ms_data.ledger.entries import Findings, read_findings
from ms_data.ledger.record import LedgerRecord, read_record
from ms_data.ledger.tally import ReasonTally

_STYLE = Path(__file__).with_name("page.css")
_FILES = 20
_BINS = 24


def draw_stats(folder: str | Path, *, out: str | Path) -> None:
    """Write an HTML report of a `clean` or `dedup` run.

    Args:
        folder: output folder of `clean` or `dedup`.
        out: HTML file to write.

    Raises:
        SettingError: the folder holds no ledger, or a damaged one.
        OutputError: the file cannot be written.
    """
    check_path("folder", folder, error=SettingError)
    check_path("out", out, error=OutputError, written="file")
    record = read_record(Path(folder))
    write_file(Path(out), render(record, read_findings(Path(folder), record), str(folder)).encode())


def render(record: LedgerRecord, findings: Findings, name: str) -> str:
    """Return the HTML report."""
    tally = record.tally
    parts = {
        "kept": tally.kept,
        "dropped": tally.dropped_documents,
        "quarantined": tally.quarantined,
    }
    dropped = sum(reason.size_bytes for reason in tally.dropped.values())
    removed = sum(rule.size_bytes for rule in tally.changed.values())
    # Rules may also add bytes; they get no bar then.
    sizes = {"kept": tally.bytes_out, "dropped": dropped, "changed": max(0, removed)}
    body = [
        f"<h1>{_escape(name)}</h1><p class=soft>ms-data {_escape(record.kind)}: outcome of "
        f"{tally.documents:,} documents</p>",
        _tiles(record, dropped, removed),
        _card("Documents", _flow(parts)),
        _card("Bytes", _flow(sizes, unit="bytes")),
        _reasons("Documents dropped, by rule and setting", tally.dropped, "dropped", "documents"),
        _reasons("Parts cut or masked", tally.cuts, "changed", "parts"),
        _reasons("Documents kept with changes, and bytes removed", tally.changed, "changed"),
        _plots(findings),
        _files(findings),
        _quarantine(findings),
        _recipe(record),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(name)}</title><style>{_STYLE.read_text('utf-8')}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _tiles(record: LedgerRecord, dropped: int, removed: int) -> str:
    tally = record.tally
    tiles_by_name = {
        "documents in": f"{tally.documents:,}",
        "kept": f"{tally.kept:,} ({_percent(tally.kept, tally.documents)})",
        "dropped": f"{tally.dropped_documents:,}",
        "quarantined": f"{tally.quarantined:,}",
        **({"empty, skipped": f"{record.empty:,}"} if record.empty else {}),
        "in": _bytes(tally.bytes_in),
        "kept as text": _bytes(tally.bytes_out),
        "dropped with documents": _bytes(dropped),
        "removed from kept documents": _bytes(removed),
    }
    tiles = (
        f"<div class=tile><b>{value}</b><span>{name}</span></div>"
        for name, value in tiles_by_name.items()
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
        f"({_percent(value, total)})</span>"
        for name, value in parts.items()
    )
    return f"<div class=flow>{bars}</div><div class=legend>{legend}</div>"


def _reasons(
    title: str, tallies: Mapping[str, ReasonTally], css_class: str, counted_noun: str = "documents"
) -> str:
    if not tallies:
        return ""
    ordered = sorted(tallies.items(), key=lambda pair: (-pair[1].documents, pair[0]))
    largest = ordered[0][1].documents or 1
    rows = "".join(
        f"<tr><td>{_examples(reason, tally)}</td><td class=n>{tally.documents:,}</td>"
        f"<td class=n>{_bytes(tally.size_bytes)}</td><td class=bar><div><i class={css_class} "
        f'style="width:{100 * tally.documents / largest:.2f}%"></i></div></td></tr>'
        for reason, tally in ordered
    )
    head = f"<th>reason<th class=n>{counted_noun}<th class=n>bytes<th class=bar>"
    return _card(title, _table(head, rows))


def _examples(reason: str, tally: ReasonTally) -> str:
    examples = "".join(
        f"<p><code>{_escape(item.place)}</code>{_value(item.value)}<br>"
        f"<q>{_escape(item.excerpt)}</q></p>"
        for item in tally.examples
    )
    name = f"<code>{_breakable(reason)}</code>"
    return f"<details><summary>{name}</summary>{examples}</details>" if examples else name


def _value(value: object) -> str:
    return "" if value is None else f" value {_escape(_number(value))}"


def _plots(findings: Findings) -> str:
    plots = [
        f"<div><h3>{_breakable(reason)}</h3>{_histogram(values.bins(_BINS), values.limit)}</div>"
        for reason, values in sorted(findings.values.items())
        if values.count > 1
    ]
    if not plots:
        return ""
    note = "<p class=soft>Values that rules measured in the documents that they dropped.</p>"
    return _card("Values", f"{note}<div class=plots>{''.join(plots)}</div>")


def _histogram(bins: Sequence[tuple[float, int]], limit: float | None) -> str:
    max_count = max(count for _, count in bins)
    width = 300 / len(bins)
    bars = "".join(
        f'<rect x="{index * width:.1f}" y="{90 - 80 * count / max_count:.1f}" '
        f'width="{width - 1:.1f}" height="{80 * count / max_count:.1f}" fill="var(--dropped)"/>'
        for index, (_, count) in enumerate(bins)
        if count
    )
    labels = f'<text x="0" y="102">{_number(bins[0][0])}</text>'
    if len(bins) > 1:
        labels += f'<text x="300" y="102" text-anchor="end">{_number(bins[-1][0])}</text>'
    limit_label = (
        ""
        if limit is None
        else f'<text x="150" y="102" text-anchor="middle">limit {limit:g}</text>'
    )
    return f'<svg viewBox="0 0 300 106" role="img">{bars}{labels}{limit_label}</svg>'


def _files(findings: Findings) -> str:
    if len(findings.files) < 2:
        return ""
    rows = "".join(
        f"<tr><td><code>{_escape(name)}</code></td><td class=n>{counts.total():,}</td>"
        f"<td class=n>{counts['kept']:,}</td><td class=n>{counts['dropped']:,}</td></tr>"
        for name, counts in _largest(findings.files)
    )
    head = "<th>file<th class=n>documents<th class=n>kept<th class=n>dropped"
    return _card(f"Files with most documents, of {len(findings.files):,}", _table(head, rows))


def _largest(files: Mapping[str, Counter[str]]) -> Iterable[tuple[str, Counter[str]]]:
    return sorted(files.items(), key=lambda pair: (-pair[1].total(), pair[0]))[:_FILES]


def _quarantine(findings: Findings) -> str:
    rows = "".join(f"<p><code>{_escape(reason)}</code></p>" for reason in findings.quarantined)
    return _card("Unreadable documents", rows) if rows else ""


def _recipe(record: LedgerRecord) -> str:
    rows = "".join(
        f"<tr><td>{_escape(name)}</td><td><code>{_escape(value)}</code></td></tr>"
        for name, value in record.recipe.items()
    )
    return _card("Settings", f"<details><summary>all</summary>{_table('', rows)}</details>")


def _card(title: str, content: str) -> str:
    return f"<section class=card><h2>{title}</h2>{content}</section>"


def _table(head: str, rows: str) -> str:
    heading = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div class=scroll><table>{heading}<tbody>{rows}</tbody></table></div>"


def _escape(value: object) -> str:
    return html.escape(str(value))


def _breakable(reason: str) -> str:
    """Allow line breaks after each part of a dotted name."""
    return _escape(reason).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, int | float) else str(value)


def _percent(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total else "0%"


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size:,} B"
