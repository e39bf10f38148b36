// The timeline of report.html: panels that share one time axis, one cursor and one zoom. Drawn by uPlot.
(function () {
  "use strict";
  const root = document.getElementById("timeline");
  const told = JSON.parse(document.getElementById("timeline-data").textContent);
  const from = (id) => document.getElementById("timeline-" + id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const number = (value, digits) =>
    value.toLocaleString("en-US", { minimumFractionDigits: digits || 0, maximumFractionDigits: digits || 0 });

  let sum = 0;
  const time = told.time_ns.map((gap) => (sum += gap) / told.unit_ns);
  const span = [0, told.end_ns / told.unit_ns];
  const least = Math.max((span[1] - span[0]) / 1e5, 1e-9);
  const narrow = root.clientWidth < 520;
  let view = span.slice();
  let at = told.worst;
  let charts = [];

  // Pages are stacked, the fullest stack first so that the thinner ones cover it.
  let below = null;
  const stacks = told.pages.map((kind) => {
    below = kind.values.map((value, i) => value + (below ? below[i] : 0));
    return { colour: kind.colour, values: below };
  }).reverse();

  const digits = () => Math.max(0, Math.min(6, Math.ceil(3 - Math.log10(view[1] - view[0]))));
  const moment = (value) => number(value, digits()) + " " + told.unit;

  function marks(u) {
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    u.ctx.save();
    let last = -1e9;
    u.ctx.fillStyle = colour("mark");
    (u === charts[0] ? told.marks : []).forEach((mark) => {
      const x = u.valToPos(mark[0] / told.unit_ns, "x", true);
      if (x < left - 1 || x > left + width + 1 || x - last < 3 * ratio) return;
      last = x;
      u.ctx.beginPath();
      u.ctx.moveTo(x - 5 * ratio, top - 9 * ratio);
      u.ctx.lineTo(x + 5 * ratio, top - 9 * ratio);
      u.ctx.lineTo(x, top);
      u.ctx.fill();
    });
    u.ctx.strokeStyle = u.ctx.fillStyle = colour("ink");
    u.ctx.lineWidth = 1.5 * ratio;
    told.ooms.forEach((when) => {
      const x = u.valToPos(when / told.unit_ns, "x", true);
      if (x < left - 1 || x > left + width + 1) return;
      u.ctx.setLineDash([5 * ratio, 3 * ratio]);
      u.ctx.beginPath();
      u.ctx.moveTo(x, top);
      u.ctx.lineTo(x, top + height);
      u.ctx.stroke();
    });
    u.ctx.restore();
  }

  function panel(title, height, series, most, data, last) {
    const grid = { stroke: () => colour("line"), width: 1 };
    const axis = { stroke: () => colour("muted"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const options = {
      width: root.clientWidth,
      height: height + (last ? 44 : 16),
      padding: [12, 8, last ? 0 : 8, 0],
      legend: { show: false },
      focus: { alpha: 1 },
      cursor: {
        y: false,
        sync: { key: "timeline", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => show(span[0], span[1]) },
      },
      scales: { x: { time: false, range: () => view }, y: { range: () => [0, most] } },
      series: [{}].concat(series),
      axes: [
        Object.assign({}, axis, {
          show: last,
          size: 44,
          space: narrow ? 60 : 80,
          label: "simulated time (" + told.unit + ")",
          labelSize: 20,
          labelFont: "12px system-ui, sans-serif",
          values: (u, ticks) => {
            const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
            return ticks.map((tick) => number(tick, Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)))));
          },
        }),
        Object.assign({}, axis, {
          size: 58,
          space: 26,
          values: (u, ticks) => ticks.map((tick) => number(tick, most <= 2 ? 1 : 0)),
          incrs: most <= 2 ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5,
            5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 5e7, 1e8, 2e8, 5e8, 1e9],
        }),
      ],
      hooks: {
        draw: [marks],
        setCursor: [(u) => read(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const low = u.posToVal(u.select.left, "x");
          const high = u.posToVal(u.select.left + u.select.width, "x");
          charts.forEach((each) => each.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false));
          show(low, high);
        }],
      },
    };
    const heading = document.createElement("p");
    heading.className = "panel";
    heading.textContent = title;
    from("panels").append(heading);
    return new uPlot(options, [time].concat(data), from("panels"));
  }

  const area = (name) => ({ fill: () => colour(name), stroke: () => colour(name), width: 0, points: { show: false } });
  const line = (name, path) =>
    ({ stroke: () => colour(name), width: 1.6, points: { show: false }, paths: path });
  const stepped = uPlot.paths.stepped({ align: 1 });

  function draw() {
    charts.forEach((chart) => chart.destroy());
    from("panels").textContent = "";
    charts = [panel("pages, of " + number(told.pool_pages), narrow ? 180 : 240, stacks.map((each) => area(each.colour)), told.pool_pages,
      stacks.map((each) => each.values), false)];
    const rest = told.lines.filter((each) => each.values);
    rest.forEach((each, i) => charts.push(panel(each.title, 84,
      [line(each.colour, each.smooth ? undefined : stepped)], (Math.max.apply(null, each.values) || 1) * 1.15,
      [each.values], i === rest.length - 1)));
    // A mark is drawn by the first of the charts, which is only known to be the first from here on.
    charts[0].redraw();
    read(null);
  }

  // What stands under the panels: the moment under the cursor, else the fullest one.
  function read(index) {
    const i = index === null || index === undefined ? told.worst : index;
    at = i;
    from("when").textContent = moment(time[i]) + (i === told.worst ? " (fullest)" : "");
    told.pages.concat(told.lines).forEach((each) => {
      if (each.values) from(each.name).textContent = number(each.values[i], each.name === "new_token_ratio" ? 3 : 0);
    });
  }

  function show(low, high) {
    let width = Math.min(Math.max(high - low, least), span[1] - span[0]);
    let start = Math.min(Math.max(low, span[0]), span[1] - width);
    view = [start, start + width];
    charts.forEach((chart) => chart.setScale("x", { min: view[0], max: view[1] }));
    let seen = 0;
    told.marks.forEach((mark) => {
      const when = mark[0] / told.unit_ns;
      if (when >= view[0] && when <= view[1]) seen += mark[1];
    });
    from("view").textContent = "In view: " + moment(view[0]) + " to " + moment(view[1]) + ", " +
      number(seen) + (seen === 1 ? " " + told.noun : " " + told.noun + "s") + ".";
  }

  const centre = () => (time[at] >= view[0] && time[at] <= view[1] ? time[at] : (view[0] + view[1]) / 2);
  function zoom(factor) {
    const middle = centre();
    show(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor);
  }
  function shift(share) {
    const by = (view[1] - view[0]) * share;
    show(view[0] + by, view[1] + by);
  }
  function place(index) {
    at = index;
    // A scale that has just been set counts only when the task is over.
    setTimeout(() => {
      const left = charts[0].valToPos(time[index], "x");
      charts.forEach((chart) => chart.setCursor({ left, top: 20 }, false));
      read(index);
      from("said").textContent = Array.from(from("readout").children, (each) =>
        each.firstChild.textContent + " " + each.lastChild.textContent).join(", ");
    });
  }
  function walk(way) {
    // A press of a key moves by what can be seen: a few pixels, or one moment where they are further apart.
    const little = (view[1] - view[0]) * 4 / Math.max(root.clientWidth, 100);
    let i = at;
    if (time[i] < view[0] || time[i] > view[1]) i = time.findIndex((each) => each >= view[0]);
    const start = time[i];
    while (i + way >= 0 && i + way < time.length && Math.abs(time[i] - start) < little) i += way;
    if (time[i] < view[0]) shift(-0.5);
    if (time[i] > view[1]) shift(0.5);
    place(i);
  }
  function worst() {
    const around = (span[1] - span[0]) / 40;
    show(time[told.worst] - around, time[told.worst] + around);
    place(told.worst);
  }

  const keys = {
    ArrowLeft: () => walk(-1),
    ArrowRight: () => walk(1),
    PageUp: () => shift(-0.8),
    PageDown: () => shift(0.8),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => show(span[0], span[1]),
    Escape: () => show(span[0], span[1]),
    Home: () => place(0),
    End: () => place(time.length - 1),
    w: worst,
  };
  from("panels").addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  const buttons = { in: () => zoom(0.5), out: () => zoom(2), left: () => shift(-0.5), right: () => shift(0.5),
    whole: () => show(span[0], span[1]), worst };
  Object.keys(buttons).forEach((name) => from(name).addEventListener("click", buttons[name]));

  root.hidden = false;
  draw();
  show(span[0], span[1]);
  new ResizeObserver(() => {
    charts.forEach((chart) => {
      if (chart.width !== root.clientWidth) chart.setSize({ width: root.clientWidth, height: chart.height });
    });
  }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
})();
