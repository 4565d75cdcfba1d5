"use strict";
// Embedded in another page, links to files beside this one lead nowhere: the styles show what to do instead.
document.documentElement.classList.toggle("embedded", location.protocol === "data:");

// A number as it is; a text that a spreadsheet would take for a formula is marked as text.
function csvCell(cell) {
  const text = (cell.dataset.value ?? cell.textContent).trim();
  const safe = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? "'" + text : text;
  return /[",\n\r]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
}

function saveShownRows(table) {
  const rows = [...table.rows].filter(row => !row.hidden);
  const text = rows.map(row => [...row.cells].filter(cell => !cell.dataset.drawn).map(csvCell).join(",")).join("\r\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text + "\r\n"], { type: "text/csv" }));
  link.download = table.dataset.name + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Every part marked with data-filter gets a field that hides what does not hold all its words, and a CSV button.
for (const part of document.querySelectorAll("[data-filter]")) {
  const table = part.querySelector("table[data-name]");
  const items = [...part.querySelectorAll(table ? "tbody tr" : ".item")];
  const texts = items.map(item => item.textContent.toLowerCase());
  const tools = document.createElement("div");
  tools.className = "tools";
  const label = document.createElement("label");
  label.append(`Filter ${part.dataset.filter} `);
  const field = document.createElement("input");
  field.type = "search";
  label.append(field);
  const count = document.createElement("output");
  const choices = (part.dataset.choose ?? "").split(" ").filter(Boolean).map(name => {
    const select = document.createElement("select");
    const values = new Set(items.flatMap(item => item.dataset[name].split(";")));
    select.append(new Option(`every ${name}`, ""), ...[...values].sort().map(value => new Option(value)));
    select.setAttribute("aria-label", name);
    select.addEventListener("change", () => show());
    return { name, select };
  });
  const isChosen = item => choices.every(({ name, select }) => !select.value || item.dataset[name].split(";").includes(select.value));
  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const rest of part.querySelectorAll("details")) rest.open ||= words.length > 0 || choices.some(({ select }) => select.value);
    items.forEach((item, number) => { item.hidden = !(isChosen(item) && words.every(word => texts[number].includes(word))); });
    count.textContent = `${items.filter(item => !item.hidden).length} of ${items.length}`;
  };
  field.addEventListener("input", show);
  tools.append(label, ...choices.map(({ select }) => select), count);
  if (table) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Save as CSV";
    button.addEventListener("click", () => saveShownRows(table));
    tools.append(button);
  }
  const heading = part.querySelector("h2, h3");
  heading ? heading.after(tools) : part.prepend(tools);
  show();
}

// The values nearest to the pointer, beside it.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const chart of document.querySelectorAll("svg.chart")) {
  const lines = [...chart.querySelectorAll("polyline")].map(line => ({
    label: line.dataset.label,
    values: line.dataset.values.split(" ").map(pair => pair.split(":")),
    places: line.getAttribute("points").trim().split(" ").map(point => Number(point.split(",")[0])),
  }));
  const axis = chart.dataset.axis;
  chart.addEventListener("pointermove", event => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    const found = lines.map(({ label, values, places }) => {
      const near = places.reduce((best, place, at) => (Math.abs(place - x) < Math.abs(places[best] - x) ? at : best), 0);
      return `${label ? label + ", " : ""}${axis} ${values[near][0]}: ${values[near][1]}`;
    });
    tip.textContent = found.join("\n");
    tip.hidden = false;
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
  });
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
}
