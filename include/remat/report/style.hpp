// SPDX-License-Identifier: Apache-2.0
/// @file
/// The style sheet and the script of reports.
#pragma once

#include <string_view>

namespace remat::detail {

/// Style sheet. Colours follow the light or dark theme of the system. Pictures carry their colours as attributes, which these
/// rules override.
inline constexpr std::string_view report_style = R"css(
:root{color-scheme:light dark;--page:#fff;--card:#f5f7f9;--ink:#1d2733;--soft:#5b6775;--line:#dde3e9;--shade:#e8ebef;
--kept:#4e79a7;--again:#f28e2b;--moved:#59a14f;--held:#1f3a5f;--limit:#d62728;--mark:#d1495b;--far:#b6c7dc}
@media(prefers-color-scheme:dark){:root{--page:#12171d;--card:#1b222b;--ink:#e4e9ee;--soft:#9dabb9;--line:#313c48;
--shade:#242d37;--kept:#6f9fd0;--again:#f5a34f;--moved:#76bd6c;--held:#8796ac;--limit:#ff6b6b;--mark:#ff7d8d;--far:#3f5570}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:66rem;padding:1.5rem 1rem 4rem;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .5rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.5rem 0 .5rem}
p{max-width:46rem;margin:.5rem 0}
.note,footer,figcaption{color:var(--soft);font-size:.9rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;margin:1.25rem 0}
dl div{background:var(--card);border-radius:.5rem;padding:.7rem .9rem}
dt{color:var(--soft);font-size:.85rem}
dd{margin:0;font-size:1.25rem;font-weight:600}
dd small{display:block;color:var(--soft);font-size:.8rem;font-weight:400}
figure{margin:1rem 0}
.wide{overflow-x:auto}
.wide:focus-visible{outline:2px solid var(--kept)}
svg{display:block;width:100%;min-width:50rem;height:auto}
svg>rect[fill="#ffffff"]{fill:none}
svg[fill]{fill:var(--ink)}
svg [stroke="#e6e6e6"]{stroke:var(--line)}
svg [stroke="#333333"]{stroke:var(--soft)}
svg [stroke="#222222"]{stroke:var(--ink)}
svg [stroke="#d62728"]{stroke:var(--limit)}
svg [fill="#d62728"]{fill:var(--limit)}
svg [fill="#eeeeee"]{fill:var(--shade)}
svg [fill="#1f3a5f"]{fill:var(--held)}
svg [fill="#4e79a7"]{fill:var(--kept)}
svg [fill="#f28e2b"]{fill:var(--again)}
svg [fill="#59a14f"]{fill:var(--moved)}
svg [fill="#b6c7dc"]{fill:var(--far)}
svg [fill="#d1495b"]{fill:var(--mark)}
svg .cursor{stroke:var(--ink);stroke-dasharray:2 2}
output{display:block;min-height:1.5em;font-size:.9rem;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;padding-left:0}
td.name{white-space:normal;overflow-wrap:anywhere;min-width:8rem;max-width:22rem}
td.name:first-child{min-width:12rem}
.text{text-align:left}
.bar{display:flex;width:9rem;height:.7rem;background:var(--shade);border-radius:.2rem;overflow:hidden}
.bar i,.key{background:var(--c)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin:0 .3em 0 .8em}
.key:first-child{margin-left:0}
.held{--c:var(--held)}.kept{--c:var(--kept)}.recomputed{--c:var(--again)}.moved{--c:var(--moved)}.temporary{--c:var(--soft)}
summary{cursor:pointer;margin:.5rem 0}
@media(max-width:40rem){body{padding-top:1rem}h1{font-size:1.35rem}.bar{width:5rem}}
@media print{details>*{display:block}}
)css";

/// Script that shows the operation under the pointer, or at the cursor that the arrow keys move.
inline constexpr std::string_view report_script = R"js(
(() => {
  const data = JSON.parse(document.getElementById('pieces').textContent);
  const box = document.getElementById('memory'), out = document.getElementById('readout'), svg = box.querySelector('svg');
  if (!svg || !data.pieces.length) return;
  const cursor = document.createElementNS(svg.namespaceURI, 'line');
  for (const [name, value] of Object.entries({class: 'cursor', y1: data.top, y2: data.bottom, visibility: 'hidden'}))
    cursor.setAttribute(name, value);
  svg.append(cursor);
  let at = -1;
  const show = i => {
    at = Math.max(0, Math.min(data.pieces.length - 1, i));
    const [begin, end, bytes, what] = data.pieces[at];
    const x = data.left + (begin + end) / 2 / data.seconds * (data.right - data.left);
    cursor.setAttribute('x1', x);
    cursor.setAttribute('x2', x);
    cursor.setAttribute('visibility', 'visible');
    out.textContent = bytes + ' at ' + data.times[at] + ': ' + what;
  };
  box.addEventListener('pointermove', event => {
    const frame = svg.getBoundingClientRect();
    const x = (event.clientX - frame.left) / frame.width * data.width;
    const time = (x - data.left) / (data.right - data.left) * data.seconds;
    let low = 0, high = data.pieces.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.pieces[middle][1] > time) high = middle; else low = middle + 1;
    }
    show(low);
  });
  box.addEventListener('keydown', event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step === undefined) return;
    show(at + step);
    event.preventDefault();
  });
})();
)js";

}  // namespace remat::detail
