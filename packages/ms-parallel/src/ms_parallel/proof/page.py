"""Renders a proof as an HTML page: the cases, their results and the smallest counterexample."""

from html import escape

from ms_parallel.proof.records import Outcome, Proof

_STYLE = """<style>
body { font-family: sans-serif; color: #202124; background: #fff; margin: 16px; max-width: 960px }
td, th { text-align: left; padding: 4px 12px 4px 0; vertical-align: top; overflow-wrap: anywhere }
.holds { color: #137333 } .fails { color: #c5221f } .refused { color: #5f6368 }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #202124 }
  .holds { color: #81c995 } .fails { color: #f28b82 } .refused { color: #9aa0a6 }
}
</style>"""


def draw_page(proof: Proof) -> str:
    """Render a proof as HTML without scripts or links."""
    verdict = "is refused" if proof.refused else "holds" if proof.holds else "does not hold"
    title = f"{proof.model}: {verdict}"
    rows = "".join(map(_row, proof.outcomes))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n{_STYLE}</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(proof.shrunk)}; seed {proof.seed}; float64, tolerance {proof.tolerance:g}; "
        f"{proof.seconds:.0f} s</p>\n{_smallest(proof)}"
        "<table><tr><th>Case</th><th>Result</th><th>Largest difference</th></tr>\n"
        f"{rows}</table>\n</body></html>\n"
    )


def _smallest(proof: Proof) -> str:
    if proof.smallest is None:
        return ""
    case, counterexample = proof.smallest
    text = f"{escape(case.text)}: {escape(counterexample.what)}"
    return f'<p class="fails">Smallest counterexample: {text}</p>\n'


def _row(outcome: Outcome) -> str:
    if outcome.refused:
        css_class, text = "refused", f"refused: {outcome.refused}"
    elif outcome.found:
        css_class, text = (
            "fails",
            "; ".join(counterexample.what for counterexample in outcome.found),
        )
    else:
        css_class, text = "holds", f"holds: {', '.join(outcome.checks)}"
    difference = f"{outcome.apart:.1e}" if outcome.compared else ""
    return (
        f"<tr><td>{escape(outcome.case.text)}</td>"
        f'<td class="{css_class}">{escape(text)}</td><td>{difference}</td></tr>\n'
    )
