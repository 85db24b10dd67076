// Elements, made once and changed in place: nothing jumps, what is open stays open, and focus stays where it is.
// Text comes in as text nodes only; there is no way through here to make markup of data.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  for (const child of children) element.append(child);
  return element;
}

export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

// Children of `parent`, one for each row, by key: `make(row)` gives a new one, `update(element, row)` fills it.
export function keyed(parent, rows, key, make, update) {
  const known = (parent.keyed ??= new Map());
  const wanted = new Set(rows.map(key));
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
  let before = parent.firstElementChild;
  for (const row of rows) {
    const name = key(row);
    let element = known.get(name);
    if (element === undefined) {
      element = make(row);
      known.set(name, element);
    }
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
    update(element, row);
  }
}

// A table: `columns` are {name, title?, numeric?, minor?, header?, fill(cell, row) or value(row)}; rows stay by key.
export function table(element, columns, rows, key, empty) {
  if (element.tBodies.length === 0) {
    const head = h("tr");
    for (const column of columns) head.append(h("th", { scope: "col", class: classes(column), title: column.title }, column.name));
    element.append(h("thead", {}, head), h("tbody"));
  }
  const body = element.tBodies[0];
  if (rows.length === 0) {
    keyed(body, [{}], () => "\0empty", () => h("tr", {}, h("td", { colspan: columns.length, class: "empty" }, empty)), () => {});
    return;
  }
  const make = () => {
    const line = h("tr");
    for (const column of columns) line.append(column.header ? h("th", { scope: "row", class: classes(column) }) : h("td", { class: classes(column) }));
    return line;
  };
  keyed(body, rows, key, make, (line, row) => {
    columns.forEach((column, at) => {
      const cell = line.children[at];
      if (column.fill) column.fill(cell, row);
      else text(cell, column.value(row));
    });
  });
}

function classes(column) {
  return [column.numeric && "numeric", column.minor && "minor", column.grow && "grow"].filter(Boolean).join(" ") || null;
}

// A bar of `parts` {class, share}, which are told in words beside it.
export function bar(parent, parts) {
  keyed(parent, parts, (part) => part.class, (part) => h("span", { class: part.class }), (element, part) => {
    const width = `${(100 * Math.min(1, Math.max(0, part.share || 0))).toFixed(2)}%`;
    if (element.style.width !== width) element.style.width = width;
  });
}

// Mark what scrolls sideways while there is more on the right, and say so below it: a table that is cut at the edge of
// a phone looks like one that ends there.
export function hintScrolling(root) {
  const seen = new ResizeObserver((entries) => entries.forEach(({ target }) => mark(target.closest(".scroll"))));
  for (const scroll of root.querySelectorAll(".scroll")) {
    scroll.after(h("p", { class: "more-hint", "aria-hidden": "true" }, "Scroll sideways for more →"));
    scroll.addEventListener("scroll", () => mark(scroll), { passive: true });
    seen.observe(scroll);
    for (const table of scroll.children) seen.observe(table);
  }
}

function mark(scroll) {
  scroll.classList.toggle("more", scroll.scrollLeft + scroll.clientWidth < scroll.scrollWidth - 2);
}
