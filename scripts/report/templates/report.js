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
