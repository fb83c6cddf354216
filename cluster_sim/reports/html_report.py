"""One page of a simulated scenario: the table, the pictures, notes, what was simulated. It loads nothing else.

The same runs give the same bytes. All text is escaped; pictures are SVG in the page, in its colours, light and dark.
"""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from cluster_sim.reports import plots
from cluster_sim.reports.figures import Figures
from cluster_sim.reports.report import rows

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --page: #ffffff; --ink: #1a1a1a; --quiet: #666666; --line: #dddddd; --better: #00734f; --worse: #b34700; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e6e6e6; --quiet: #9a9a9a; --line: #3a3d42; --better: #4cc9a0; --worse: #ff9a5c; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; }
thead th { font-weight: 600; vertical-align: bottom; }
small { color: var(--quiet); padding-left: .4rem; } small.better { color: var(--better); }
small.worse { color: var(--worse); }
.panels { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.panels svg { height: auto; width: 100%; }
pre { border: 1px solid var(--line); overflow-x: auto; padding: .8rem; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>Simulated: engines, links and copies cost what the cost models say; nothing here was measured on a device.</p>
<h2>Variants</h2>
<div class="wide"><table>
<thead><tr><th></th>{% for run in runs %}<th scope="col">{{ run.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr><th scope="row">{{ row.measure.name }}</th>
{%- for _ in runs %}{% set place = loop.index0 %}<td>{{ row.text(place) }}
{%- if row.ratio_text(place) %}<small
{%- if row.is_better(place) is not none %} class="{{ "better" if row.is_better(place) else "worse" }}"{% endif -%}
>{{ row.ratio_text(place) }}</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% if runs|length > 1 %}<p>x: times the first variant.</p>
{% endif %}<h2>Pictures</h2>
<div class="panels">
{% for panel in panels %}<figure>{{ panel }}</figure>
{% endfor %}</div>
{% if notes %}<h2>Notes</h2>
<ul>
{% for note in notes %}<li>{{ note }}</li>
{% endfor %}</ul>
{% endif %}<h2>Scenario</h2>
<pre>{{ scenario }}</pre>
</body>
</html>
"""


def page(title: str, scenario: str, runs: Sequence[Figures], notes: Sequence[str] = ()) -> str:
    """scenario: its YAML, as given. notes: sentences. Raises ValueError without a run."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_PAGE).render(
        title=title,
        scenario=scenario,
        runs=runs,
        rows=rows(runs),
        notes=notes,
        # Drawn here, names in it escaped by the writer of SVG.
        panels=[Markup(plots.svg(runs, panel)) for panel in plots.PANELS],
    )


def save(title: str, scenario: str, runs: Sequence[Figures], path: Path, notes: Sequence[str] = ()) -> None:
    path.write_text(page(title, scenario, runs, notes), encoding="utf-8")
