"""The style sheet of the page: light and dark, narrow and wide, screen and print. It loads nothing."""

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f9; --text: #1c2128; --weak: #59636e; --line: #d9dee4;
  --good: #116329; --bad: #b42318;
  --c0: #1f5fd0; --c1: #c2410c; --c2: #0f7b4f; --c3: #b0217a; --c4: #6d3bd1;
  --c5: #0b7285; --c6: #6b7200; --c7: #a61b1b; }
@media (prefers-color-scheme: dark) { :root { --back: #12161b; --card: #1b2128; --text: #e6eaef; --weak: #9aa5b1;
  --line: #333c46; --good: #56d27f; --bad: #ff8a7a;
  --c0: #6ea8ff; --c1: #ff9d5c; --c2: #4fd39a; --c3: #ff8ac9; --c4: #b79bff;
  --c5: #5fd0e6; --c6: #d3d95c; --c7: #ff8080; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 8px 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 8px; padding-top: 8px; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 0 0 8px; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.weak, figcaption, .legend { color: var(--weak); font-size: .85rem; }
.legend span { display: inline-block; margin-right: 16px; overflow-wrap: anywhere; unicode-bidi: isolate; }
.notes { border-left: 3px solid var(--bad); padding: 4px 12px; background: var(--card); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  min-width: 0; break-inside: avoid; }
figcaption span { display: block; overflow-wrap: anywhere; unicode-bidi: isolate; }
.plot { padding: 6px 4px 0 54px; }
svg { display: block; overflow: visible; }
svg text { fill: var(--weak); font-size: 11px; }
.grid { stroke: var(--line); stroke-width: 1; }
polyline, .level, .restart { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.thin { stroke-width: 1.3; opacity: .8; }
.thick { stroke-width: 2; }
.level { stroke-width: 1.5; stroke-dasharray: 2 4; }
.restart { stroke-width: 1; stroke-dasharray: 6 4; opacity: .7; }
.plot.pairs { padding-left: min(40%, 240px); }
.error { stroke: var(--text); stroke-width: 2; }
.published { stroke: var(--text); stroke-width: 1; stroke-dasharray: 5 4; }
.swatch { display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: 2px; }
.swatch.thin { border-top-width: 1px; }
.swatch.dotted { border-top-style: dotted; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: 8px 0; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px; border-bottom: 1px solid var(--line);
  max-width: 34rem; overflow-wrap: anywhere; unicode-bidi: isolate; }
td, thead th { min-width: 6rem; }
.events tbody th { min-width: 4rem; }
.events td:last-child { min-width: 17rem; }
.numbers td { min-width: 10rem; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--card); }
tbody th { font-weight: 600; min-width: 8rem; }
.numbers td { font-variant-numeric: tabular-nums; }
.right { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); }
.text { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
pre { overflow-x: auto; font-size: .8rem; padding: 12px; margin: 0; background: var(--card); }
summary { cursor: pointer; padding: 6px 0; }
code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
@media print { :root { color-scheme: light; --back: #ffffff; --card: #ffffff; --text: #000000; --weak: #444444;
  --line: #bbbbbb; } body { font-size: 11px; } main { max-width: none; padding: 0; }
  .charts { grid-template-columns: 1fr 1fr; } .scroll { overflow: visible; } tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } details:not([open]) { display: none; } }
""" + "\n".join(
    f".run{number} {{ stroke: var(--c{number}); }} i.run{number} {{ border-top-color: var(--c{number}); }} "
    f"circle.run{number}, rect.run{number} {{ fill: var(--c{number}); }}"
    for number in range(8)
)
