"""The page that a report is poured into: markup and style, no script, nothing from outside."""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>sparsewire · $run</title>
<style>
:root {
  color-scheme: light dark;
  --paper: #f5f6f8; --panel: #ffffff; --ink: #1b1f24; --muted: #5f6774; --grid: #e3e6eb; --line: #dfe3e8;
  --good: #14805e; --bad: #b3382f;
  --series-1: #2f6fdb; --series-2: #d9702c; --series-3: #14937f; --series-4: #8a5cc7; --series-5: #c2476f;
  --series-6: #7a8b1f; --other: #b9c0c9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #0f1216; --panel: #171b21; --ink: #e8ebef; --muted: #9aa4b1; --grid: #2a3038; --line: #262c34;
    --good: #4cc79b; --bad: #f0857b;
    --series-1: #6ea0f5; --series-2: #f0985c; --series-3: #3fc4ad; --series-4: #b592ea; --series-5: #ec7ba0;
    --series-6: #b3c34a; --other: #5a636f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; padding: 2.5rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1080px; margin: 0 auto; }
header { margin-bottom: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; font-weight: 650; letter-spacing: -.01em; }
h2 { font-size: 1rem; margin: 0; font-weight: 620; }
header p { margin: 0; color: var(--muted); }
.verdict { margin-top: .75rem; font-weight: 600; }
.verdict.good { color: var(--good); }
.verdict.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(175px, 1fr)); gap: .75rem; margin-bottom: .75rem; }
.tile, .card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .9rem 1rem; display: flex; flex-direction: column; }
.tile b { font-size: 1.65rem; line-height: 1.15; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { margin-top: .2rem; }
.tile small { color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem; margin-bottom: .75rem; }
.card { padding: 1rem 1.1rem; margin: 0 0 .75rem; }
.figure { margin: 0; }
.wide { grid-column: 1 / -1; }
figcaption p, .card > p { color: var(--muted); margin: .1rem 0 .5rem; font-size: .87rem; }
.card > p { margin: .6rem 0 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: .5rem; font-variant-numeric: tabular-nums; font-size: .92rem; }
th { text-align: right; color: var(--muted); font-weight: 500; font-size: .82rem; vertical-align: bottom; }
td { text-align: right; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem; align-items: start; }
.notes { margin: .5rem 0 0; padding: 0; list-style: none; font-size: .9rem; }
.notes li { padding: .2rem 0; overflow-wrap: anywhere; }
.notes time { display: inline-block; min-width: 5.5rem; color: var(--muted); font-variant-numeric: tabular-nums; }
@media (max-width: 760px) { .figures, .pair { grid-template-columns: minmax(0, 1fr); } }
</style>
</head>
<body>
<main>
<header>
<h1>sparsewire · run $run</h1>
<p>$when</p>
<p class="verdict $verdict_class">$verdict</p>
</header>
<div class="tiles">$tiles</div>
<div class="figures">$figures</div>
$sheets
<div class="pair">$ledger$configuration</div>
$notes
</main>
</body>
</html>
""")
