"use strict";
// Draws the figures of the page from the declarations and values in its JSON.
const page = JSON.parse(document.getElementById("values").textContent);
const tables = page.data.map((columns) => {
  const names = Object.keys(columns);
  return (columns[names[0]] || []).map((_, i) =>
    Object.fromEntries(names.map((name) => [name, columns[name][i]])));
});

// Calls `change` with every encoding of an axis in a declaration.
function onAxis(spec, axis, change) {
  if (spec === null || typeof spec !== "object") return;
  if (spec.encoding && spec.encoding[axis]) change(spec.encoding[axis]);
  for (const part of [...(spec.layer || []), spec.spec]) onAxis(part, axis, change);
}

function hasLog(spec, axis) {
  let found = false;
  onAxis(spec, axis, (encoding) => { found ||= encoding.scale && encoding.scale.type === "log"; });
  return found;
}

function makeLinear(spec, axis) {
  onAxis(spec, axis, (encoding) => {
    if (!encoding.scale || encoding.scale.type !== "log") return;
    encoding.scale = { type: "linear", zero: true };
    for (const part of ["values", "gridOpacity"]) if (encoding.axis) delete encoding.axis[part];
  });
}

// Fits a declaration to the width of its place; panels stand side by side if there is room.
function fit(spec, width) {
  delete spec.title; // the page has it as text, which can wrap
  if (spec.facet) {
    spec.columns = width < 420 ? 1 : 3;
    spec.spec.width = Math.floor((width - (width < 420 ? 90 : 115)) / spec.columns);
  } else {
    Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
  }
  Object.assign(spec.config.legend, { columns: Math.max(1, Math.floor(width / 105)), labelLimit: width - 100 });
}

function save(name, content, type) {
  const link = document.createElement("a");
  link.href = content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
}

function toCsv(rows) {
  const quote = (value) => {
    const text = value === null ? "" : String(value);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const names = Object.keys(rows[0] || {});
  return [names, ...rows.map((row) => names.map((name) => row[name]))]
    .map((line) => line.map(quote).join(",") + "\n").join("");
}

class Drawing {
  constructor(element, { spec, data }) {
    Object.assign(this, { element, spec, rows: tables[data], linear: new Set() });
    this.place = element.querySelector(".drawing");
    for (const button of element.querySelectorAll("button")) {
      const { axis, save: kind } = button.dataset;
      if (axis) {
        button.hidden = !hasLog(spec, axis);
        button.onclick = () => this.toggle(axis, button);
      } else {
        button.onclick = () => this.save(kind);
      }
    }
  }

  async draw() {
    const spec = structuredClone(this.spec);
    for (const axis of this.linear) makeLinear(spec, axis);
    this.width = this.place.clientWidth;
    fit(spec, this.width);
    spec.datasets = { rows: this.rows };
    this.view?.finalize();
    const options = {
      renderer: "svg", actions: false, tooltip: { theme: "custom" },
      logLevel: 1, // errors; it would warn of layers that are empty, as bands of a single seed
    };
    this.view = (await vegaEmbed(this.place, spec, options)).view;
    this.element.dataset.drawn = "yes";
  }

  toggle(axis, button) {
    if (!this.linear.delete(axis)) this.linear.add(axis);
    button.textContent = `${axis}: ${this.linear.has(axis) ? "linear" : "log"}`;
    return this.draw();
  }

  async save(kind) {
    const name = `${this.element.id}.${kind}`;
    if (kind === "csv") return save(name, toCsv(this.rows), "text/csv");
    const before = this.view.background();
    this.view.background("white");
    if (kind === "svg") save(name, await this.view.toSVG(), "image/svg+xml");
    else save(name, await this.view.toImageURL("png", 2), "image/png");
    this.view.background(before);
    return this.view.runAsync();
  }
}

const drawings = [...document.querySelectorAll("figure")]
  .map((element, i) => new Drawing(element, page.figures[i]));

async function drawAll() {
  for (const drawing of drawings) await drawing.draw();
  document.body.dataset.drawn = "yes";
}

let waiting;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    for (const drawing of drawings) if (drawing.place.clientWidth !== drawing.width) drawing.draw();
  }, 150);
});
drawAll();
