"""How report.html looks: plain, readable at 390 px, light or dark as the reader prefers, and on paper."""

CSS = """
:root{--paper:#fff;--ink:#1f2328;--muted:#59636e;--line:#d1d9e0;--soft:#f6f8fa;
--good:#1a7f37;--warning:#9a6700;--bad:#cf222e;
--blue:#0072b2;--orange:#e69f00;--green:#009e73;--mark:#d55e00;--empty:#e6eaee}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--muted:#9198a1;--line:#3d444d;--soft:#151b23;
--good:#3fb950;--warning:#d29922;--bad:#f85149;--blue:#3b9fd8;--empty:#2b323b}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 3rem;max-width:66rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0}
h2{font-size:1.15rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .4rem}
p{margin:.4rem 0}
ul{margin:.4rem 0;padding-left:1.2rem}
li{margin:.25rem 0}
.about{color:var(--muted)}
.verdict{margin-top:1rem;padding:.9rem 1.1rem;background:var(--soft);border-left:.4rem solid var(--tone);
border-radius:.35rem}
.good{--tone:var(--good)}.warning{--tone:var(--warning)}.bad{--tone:var(--bad)}
.badge{color:var(--tone);font-weight:700;text-transform:uppercase;letter-spacing:.06em;font-size:.85rem}
.headline{font-size:1.2rem;line-height:1.4;margin:.2rem 0 0}
.law{font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:0}
.tiles div{padding:.55rem .75rem;border:1px solid var(--line);border-radius:.35rem}
dt{color:var(--muted);font-size:.85rem}
dd{margin:0;font-variant-numeric:tabular-nums}
figure{margin:1rem 0 1.5rem}
img{display:block;width:100%;height:auto}
figcaption{color:var(--muted);font-size:.9rem;margin-top:.3rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.35rem}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.3rem .65rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}
td{white-space:nowrap}
td.words{white-space:normal;min-width:19rem}
.words,.left,tbody th{text-align:left}
thead th{color:var(--muted);font-weight:600;vertical-align:bottom}
tbody th{font-weight:400}
tbody tr:last-child>*{border-bottom:0}
.keys{width:100%}
.keys{table-layout:fixed}
.keys th,.keys td{white-space:normal;overflow-wrap:anywhere;text-align:left}
.keys th{width:45%}
.latency th[scope=row]{min-width:10rem}
pre{margin:.4rem 0;padding:.7rem .9rem;background:var(--soft);border:1px solid var(--line);border-radius:.35rem;
overflow-x:auto;font:.85rem/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--soft)}
li code{white-space:nowrap}
.note{color:var(--muted);font-size:.9rem}
.panel{margin:.5rem 0 0;color:var(--muted);font-size:.85rem}
.unseen{position:absolute;width:1px;height:1px;margin:-1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.buttons{display:flex;flex-wrap:wrap;gap:.4rem;margin:.5rem 0}
button{min-height:2rem;padding:.2rem .7rem;font:inherit;font-size:.9rem;color:var(--ink);background:var(--soft);
border:1px solid var(--muted);border-radius:.35rem;cursor:pointer}
:focus-visible{outline:3px solid var(--blue);outline-offset:2px}
#timeline-panels{touch-action:pan-y}
.u-select{background:var(--ink);opacity:.15}
.readout{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.2rem,1fr));gap:.3rem .8rem;margin:.4rem 0;
padding:.5rem .75rem;border:1px solid var(--line);border-radius:.35rem;min-height:4rem}
.readout i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;background:var(--tone);
border:1px solid var(--muted)}
.blue{--tone:var(--blue)}.orange{--tone:var(--orange)}.green{--tone:var(--green)}.empty{--tone:var(--empty)}
.default>*{color:var(--muted)}
summary{cursor:pointer;padding:.3rem 0}
details[open]>summary{margin-bottom:.4rem}
footer{margin-top:3rem;color:var(--muted);font-size:.85rem}
@media print{body{max-width:none;font-size:11pt}figure,.verdict{break-inside:avoid}
.buttons,#timeline-keys{display:none}}
""".strip()
