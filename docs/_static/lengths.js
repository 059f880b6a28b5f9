// The page "Try lengths like yours": three questions, and the timelines of the chosen cell. The data are simulated when
// the site is built (docs/_ext/lengths.py), in lengths_data.js. Without scripts the page is a table.
"use strict";
(() => {
  const data = window.LENGTHS;
  const place = document.getElementById("lengths");
  if (!data || !place) return;

  const STATES = { f: "forward", b: "backward", w: "wait", s: "step" };
  const WORDS = { forward: "forward", backward: "backward", wait: "waiting, transfers included", step: "optimizer step" };
  const LABEL = 58; // pixels left of a timeline
  const WAYS = { "ODC + LB-Mini": "ODC + LB-Mini", "ODC + LB-Split": "ODC, long sequences split (LB-Split)" };
  const chosen = { lengths: "longalign", ranks: "8", samples: "4" };

  function add(parent, tag, attributes = {}, text = "") {
    const svg = parent.namespaceURI.endsWith("svg") || tag === "svg";
    const element = document.createElementNS(svg ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.appendChild(element);
    return element;
  }

  function ask(name, question, answers) {
    const set = add(form, "fieldset");
    add(set, "legend", {}, question);
    for (const [value, words] of answers) {
      const label = add(set, "label");
      const radio = add(label, "input", { type: "radio", name: `lengths-${name}`, value });
      radio.checked = value === chosen[name];
      radio.addEventListener("change", () => {
        chosen[name] = value;
        show();
      });
      label.append(` ${words}`);
    }
  }

  const many = (count, word) => (count === "1" ? `1 ${word}` : `${count} ${word}s`);

  // A way's timeline: a row per rank, a path per rank and state, to the scale of the widest of the three.
  function draw(way, width) {
    const height = way.rows.length > 8 ? 9 : 14;
    const step = height + 4;
    const box = { viewBox: `0 0 ${width} ${way.rows.length * step}`, width, height: way.rows.length * step };
    const svg = add(timelines, "svg", { ...box, class: "figure", role: "img", "aria-label": `${named(way)}, ${told(way)}` });
    const scale = (width - LABEL) / data.width / 10;
    way.rows.forEach((row, rank) => {
      const y = rank * step;
      const paths = {};
      let x = LABEL;
      for (const [, state, tenths] of row.matchAll(/([a-z])(\d+)/g)) {
        const wide = tenths * scale;
        paths[state] = `${paths[state] || ""}M${x.toFixed(2)} ${y}h${wide.toFixed(2)}v${height}h${(-wide).toFixed(2)}z`;
        x += wide;
      }
      for (const state in paths) add(svg, "path", { class: STATES[state], d: paths[state], style: "stroke:none" });
      const shown = way.rows.length <= 8 || rank % 4 === 0;
      if (shown) add(svg, "text", { class: "faint small", x: 0, y: y + height / 2 + 4.5 }, `rank ${rank}`);
    });
  }

  const cell = () => data.cells[`${chosen.lengths} ${chosen.ranks} ${chosen.samples}`];
  const named = (way) => WAYS[way.name] || way.name;
  const told = (way) => `${way.step} s per step, ${way.idle} idle`;

  function show() {
    const { lengths, ranks, samples } = chosen;
    const [theirs, mini, split] = cell().ways;
    const same = split.step === mini.step && split.idle === mini.idle;
    const faster = (way) => (way.ratio > 1.02 ? `${way.ratio} times as fast` : "no gain");
    const why = samples > 2 ? "there is little waiting to remove" : "the longest sequence determines the step";
    summary.textContent =
      `${data.lengths[lengths]}, ${many(ranks, "rank")}, ${many(samples, "sample")} per rank, predicted: ` +
      `${theirs.name} takes ${told(theirs)}. LB-Mini: ${told(mini)}, ${faster(mini)}` +
      (mini.ratio > 1.02 ? ". " : `, as ${why}. `) +
      (same ? "Splitting adds nothing here." : `Split sequences: ${told(split)}, ${faster(split)}.`);
    command.textContent = cell().command;
    scale.textContent =
      `Drawn is the first of the command's 16 minibatches, all three to one scale: the widest takes ${cell().longest} s. ` +
      "The numbers are means of the 16.";
    paint();
  }

  function paint() {
    const width = Math.max(280, Math.min(timelines.clientWidth, LABEL + data.width));
    timelines.replaceChildren();
    for (const way of cell().ways) {
      const head = add(timelines, "p", { class: "way" });
      add(head, "strong", {}, named(way));
      head.append(`: ${told(way)}`);
      draw(way, width);
    }
  }

  const form = add(place, "form", { "aria-label": "Your lengths" });
  ask("lengths", "Lengths like those of", Object.entries(data.lengths));
  ask("ranks", "Ranks (GPUs)", data.ranks.map((n) => [`${n}`, `${n}`]));
  ask("samples", "Samples per rank and step", data.samples.map((n) => [`${n}`, `${n}`]));
  const summary = add(place, "p", { role: "status", "aria-live": "polite", class: "summary" });
  const timelines = add(place, "div", { class: "timelines" });
  const legend = add(place, "p", { class: "legend" });
  for (const [state, words] of Object.entries(WORDS)) {
    const entry = add(legend, "span");
    const key = add(entry, "svg", { class: "figure", width: 12, height: 12, "aria-hidden": "true" });
    add(key, "rect", { class: state, width: 12, height: 12 });
    entry.append(` ${words}`);
  }
  const scale = add(place, "p");
  add(place, "p", {}, "The command of this cell prints the same numbers:");
  const command = add(add(add(place, "div", { class: "highlight" }), "pre"), "code");

  for (const folded of document.querySelectorAll("details[open]")) folded.open = false;
  show();
  let width = timelines.clientWidth;
  new ResizeObserver(() => {
    if (timelines.clientWidth === width) return;
    width = timelines.clientWidth;
    paint();
  }).observe(timelines);
})();
