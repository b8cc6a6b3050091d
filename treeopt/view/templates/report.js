"use strict";
(() => {
  const picture = document.querySelector("#tree .treeopt-tree");
  if (!picture) return;
  const status = document.getElementById("tree-status");
  const paths = [[], ...JSON.parse(document.getElementById("report-data").textContent).tree.paths];
  const index = new Map(paths.map((path, i) => [path.join(), i]));
  const items = paths.map((path) => ({ parent: index.get(path.slice(0, -1).join()), depth: path.length }));
  const nodes = [...picture.querySelectorAll("g.node")]; // in the order of the paths
  const rows = nodes.map((node) => node.getBBox().y + node.getBBox().height / 2);
  const byRow = (found) => found.sort((a, b) => rows[a] - rows[b]);
  const where = (test) => byRow([...nodes.keys()].filter(test));
  const children = (i) => where((other) => other && items[other].parent === i);
  const beside = (i, by) => {
    const level = where((other) => items[other].depth === items[i].depth);
    return level[level.indexOf(i) + by];
  };
  const moves = {
    ArrowLeft: (i) => (i ? items[i].parent : undefined),
    ArrowRight: (i) => children(i)[0],
    ArrowUp: (i) => beside(i, -1),
    ArrowDown: (i) => beside(i, 1),
    Home: () => 0,
  };
  const words = (i) => nodes[i].querySelector("title").textContent;
  let current = 0;
  const say = (i) => {
    status.textContent = words(i);
  };
  const focus = (i) => {
    if (i === undefined) return;
    nodes[current].setAttribute("tabindex", "-1");
    nodes[i].setAttribute("tabindex", "0");
    current = i;
    nodes[i].focus();
  };
  picture.setAttribute("role", "group");
  nodes.forEach((element, i) => {
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", words(i));
    element.setAttribute("tabindex", i === current ? "0" : "-1");
    element.addEventListener("focus", () => say(i));
    element.addEventListener("mouseenter", () => say(i));
    element.addEventListener("click", () => focus(i));
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        say(i);
        return;
      }
      const move = moves[event.key];
      if (!move) return;
      event.preventDefault();
      focus(move(i));
    });
  });
})();
