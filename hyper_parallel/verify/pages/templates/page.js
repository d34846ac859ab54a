// Tables marked data-sort get sorting heads, those marked data-filter a search field and a choice per marked column.
"use strict";
const keyOf = (row, at) => row.cells[at].dataset.key ?? row.cells[at].textContent.trim();
const order = (a, b) => {
  const [x, y] = [Number(a), Number(b)];
  if (a !== "" && b !== "" && !isNaN(x) && !isNaN(y)) return x - y;
  return a.localeCompare(b, "en", { numeric: true });
};

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, at) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      // What has no value stays at the end in either direction.
      rows.sort((a, b) => {
        const [x, y] = [keyOf(a, at), keyOf(b, at)];
        if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
        return falling ? order(y, x) : order(x, y);
      });
      table.tBodies[0].append(...rows);
    });
  });
}

function field(controls, text, control) {
  const label = document.createElement("label");
  label.append(text, control);
  controls.append(label);
  return control;
}

function choice(controls, head, at, rows) {
  const select = field(controls, head.dataset.choice, document.createElement("select"));
  select.append(new Option("any", ""));
  [...new Set(rows.map((row) => keyOf(row, at)))].filter(Boolean).sort(order).forEach((one) => select.append(new Option(one)));
  return (row) => select.value === "" || keyOf(row, at) === select.value;
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows];
  const controls = document.createElement("div");
  controls.className = "controls";
  const search = field(controls, "search", document.createElement("input"));
  search.type = "search";
  const tests = [(row) => search.value.toLowerCase().split(/\s+/).every((word) => row.textContent.toLowerCase().includes(word))];
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    if (head.dataset.choice) tests.push(choice(controls, head, at, rows));
  });
  const count = document.createElement("output");
  controls.append(count);
  const apply = () => {
    rows.forEach((row) => { row.hidden = !tests.every((test) => test(row)); });
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  controls.addEventListener("input", apply);
  apply();
  table.closest(".scroll").before(controls);
}

// A button copies the text of its neighbour; where the browser refuses, the text is selected.
function copyable(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
  text.after(button);
}

// A link to something inside folded text unfolds it, one to a row that a filter hides shows it.
const unfold = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let one = target; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  target.hidden = false;
  target.scrollIntoView();
};
addEventListener("hashchange", unfold);

document.querySelectorAll("table[data-filter]").forEach(filterable);
document.querySelectorAll("table[data-sort]").forEach(sortable);
document.querySelectorAll("[data-copy]").forEach(copyable);
unfold();
