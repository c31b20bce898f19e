"use strict";
addEventListener("error", (event) => {
  const place = document.getElementById("script-error");
  place.textContent = "The page's script failed: " + event.message;
  place.hidden = false;
});

const STEP = 10;
const find = (id) => document.getElementById(id);
const list = find("answers");
const inspect = find("inspect");

function viewer() {
  const all = [...list.querySelectorAll(".answer")].map((node, place) => ({
    node,
    place,
    depth: Number(node.dataset.depth),
    tokens: Number(node.dataset.tokens),
    differ: "differ" in node.dataset,
    text: node.textContent.toLowerCase(),
  }));
  const orders = {
    input: (a, b) => a.place - b.place,
    deep: (a, b) => b.depth - a.depth || a.place - b.place,
    shallow: (a, b) => a.depth - b.depth || a.place - b.place,
    long: (a, b) => b.tokens - a.tokens || a.place - b.place,
  };
  let limit = STEP;

  function show() {
    const words = find("search").value.toLowerCase().trim();
    const differ = find("differ")?.checked;
    const chosen = all.filter((one) => one.text.includes(words) && (!differ || one.differ));
    chosen.sort(orders[find("order").value]);
    for (const one of all) one.node.hidden = true;
    for (const one of chosen.slice(0, limit)) {
      one.node.hidden = false;
      list.append(one.node);
    }
    const shown = Math.min(limit, chosen.length);
    find("found").textContent = chosen.length ? `${shown} of ${chosen.length} answers` : "no answer has that";
    find("more").hidden = shown === chosen.length;
  }

  function again() {
    limit = STEP;
    show();
  }
  find("search").addEventListener("input", again);
  find("order").addEventListener("change", again);
  find("differ")?.addEventListener("change", again);
  find("more").addEventListener("click", () => {
    limit *= 3;
    show();
  });
  find("tools").hidden = false;
  show();
}

let marked = null;
function mark(token) {
  marked?.classList.remove("on");
  marked = token;
  marked?.classList.add("on");
  inspect.hidden = !token;
  if (!token) return;
  const place = [...token.parentNode.children].indexOf(token);
  const depth = token.dataset.d ?? /\bd(\d+)/.exec(token.className)[1];
  const text = token.classList.contains("e") || token.closest(".strip") ? "" : ` “${token.textContent}”`;
  const where = place ? `left after loop ${depth}` : `from prefill, all ${depth} loops`;
  inspect.textContent = `token ${place}${text}: ${where}`;
}
for (const kind of ["pointerover", "click"]) {
  addEventListener(kind, (event) => {
    const token = event.target.closest?.(".tokens span, .strip span");
    if (token || marked) mark(token);
  });
}
if (list) viewer();
