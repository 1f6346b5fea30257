"use strict";
(() => {
  // Everything in `data` comes from files: it becomes text nodes and attributes, never markup.
  const data = JSON.parse(document.getElementById("data").textContent);
  let policy = data.policies[0];
  const COLORS = 12;
  const $ = (id) => document.getElementById(id);

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return node;
  }

  const text = (index) => (index === null ? "" : data.strings[index]);
  data.entries = data.entries.map(([parts, fits, memory]) => ({ parts, fits, memory }));
  data.candidates = data.candidates.map(([backend, usual, experts, usable, ...reasons]) => (
    { backend: text(backend), usual: text(usual), experts: text(experts), usable, reasons }));
  const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;

  function gib(bytes) {
    const value = bytes / 2 ** 30;
    return `${Math.abs(value) >= 99.95 ? value.toFixed(0) : Number(value.toPrecision(3))} GiB`;
  }

  // What cells are marked with, apart from their backend: a state, and signs that do not depend on colour.
  const MARKS = {
    unfit: { sign: "!", label: "does not fit", words: "the weights do not fit into the GPU's memory" },
    fallback: { sign: "\u2193", label: "fallback", words: "a fallback" },
    none: { sign: "\u00d7", label: "no backend", words: "no backend" },
    refused: { sign: "\u2013", label: "refused", words: "the engine refuses this deployment" },
  };

  function answersOf(entry) {
    return entry === null ? [] : data.entries[entry].parts.map(([layers, answer]) => [text(layers), data.answers[answer]]);
  }

  function marksOf(entry) {
    const marks = new Set();
    if (entry === null) return marks;
    if (data.entries[entry].fits === false) marks.add("unfit");
    for (const [, answer] of answersOf(entry)) {
      if (answer.state !== "chosen") marks.add(answer.state);
      else if (answer.fallback !== null) marks.add("fallback");
    }
    return marks;
  }

  // Whether the usual name of a backend's kernels says more than the engine's name.
  const says = ({ backend, usual }) => Boolean(usual) && usual.toLowerCase() !== backend.toLowerCase();
  const colorOf = (backend) => `c${data.backends.indexOf(backend) % COLORS}`;
  const shownName = (answer) => (answer.state === "chosen" ? answer.backend : answer.state);

  // The table.

  let cells = [];
  let rows = [];

  function drawHead() {
    const gpuRow = make("tr"), deploymentRow = make("tr");
    gpuRow.append(make("th", { class: "model", rowspan: 2, scope: "col" }, "Model"));
    data.gpus.forEach((gpu, number) => {
      const columns = data.columns.filter((column) => column.gpu === number);
      const memory = gpu.memory ? ` \u00b7 ${gib(gpu.memory)}` : "";
      gpuRow.append(make("th", { class: "first", colspan: columns.length, scope: "colgroup", "data-gpu": number, title: gpu.name },
        make("span", { class: "gpu" }, gpu.key, make("small", {}, `${gpu.arch}${memory}`))));
      columns.forEach((column, place) => {
        deploymentRow.append(make("th", { class: place ? null : "first", scope: "col", "data-gpu": number }, column.label));
      });
    });
    return make("thead", {}, gpuRow, deploymentRow);
  }

  function cellLabel(model, column, entry) {
    const names = answersOf(entry).map(([, answer]) => (answer.state === "chosen" ? answer.backend : MARKS[answer.state].words));
    const marks = [...marksOf(entry)].filter((mark) => mark in { unfit: 1, fallback: 1 }).map((mark) => MARKS[mark].words);
    return [`${model.name} on ${data.gpus[column.gpu].key}, ${column.label}`, ...new Set(names), ...marks].join(": ");
  }

  function drawCell(modelNumber, columnNumber) {
    const model = data.models[modelNumber], column = data.columns[columnNumber], entry = data.shared[policy.cells[modelNumber]][columnNumber];
    const first = columnNumber === 0 || data.columns[columnNumber - 1].gpu !== column.gpu;
    const holder = make("td", { class: first ? "first" : null, role: "gridcell", "data-gpu": column.gpu });
    if (entry === null) return holder;
    const marks = marksOf(entry);
    const label = cellLabel(model, column, entry);
    const button = make("button", {
      type: "button", class: `cell${marks.has("unfit") ? " unfit" : ""}`, tabindex: -1, "aria-label": label, title: label,
    });
    const parts = new Map();
    for (const [, answer] of answersOf(entry)) {
      const name = shownName(answer), fallback = answer.state === "chosen" && answer.fallback !== null;
      if (parts.has(name)) parts.get(name).fallback ||= fallback;
      else parts.set(name, { answer, fallback });
    }
    for (const [name, { answer, fallback }] of parts) {
      const part = make("span", { class: `part ${answer.state === "chosen" ? colorOf(answer.backend) : answer.state}` });
      if (answer.state !== "chosen") part.append(make("span", { class: "mark" }, MARKS[answer.state].sign));
      part.append(make("span", { class: "backend" }, name));
      if (fallback) part.append(make("span", { class: "mark fallback" }, MARKS.fallback.sign));
      button.append(part);
    }
    if (marks.has("unfit")) button.lastChild.append(make("span", { class: "mark unfit" }, MARKS.unfit.sign));
    holder.append(button);
    const record = { modelNumber, columnNumber, entry, button, holder, marks,
      backends: new Set(answersOf(entry).filter(([, answer]) => answer.state === "chosen").map(([, answer]) => answer.backend)) };
    button.addEventListener("click", () => open(record));
    cells.push(record);
    return holder;
  }

  function named(name) {
    const cut = name.lastIndexOf("/") + 1;
    return make("span", { class: "name" }, make("span", { class: "org" }, name.slice(0, cut)), make("b", {}, name.slice(cut)));
  }

  function drawTable() {
    cells = [];
    rows = [];
    const body = make("tbody");
    data.models.forEach((model, modelNumber) => {
      const row = make("tr", {}, make("th", { class: "model", scope: "row" },
        named(model.name), make("span", { class: "more" }, model.format)));
      const start = cells.length;
      data.columns.forEach((_, columnNumber) => row.append(drawCell(modelNumber, columnNumber)));
      rows.push({ row, cells: cells.slice(start), searched: `${model.name} ${model.format}`.toLowerCase() });
      body.append(row);
    });
    $("matrix").replaceChildren(drawHead(), body);
  }

  // Filters: words, one backend or mark, GPUs.

  const chosenGpus = new Set(data.gpus.keys());
  let wanted = "";

  const matches = (cell) => wanted === "" || (wanted.startsWith("mark:") ? cell.marks.has(wanted.slice(5)) : cell.backends.has(wanted.slice(8)));

  function filter() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    let shownRows = 0, shownCells = 0;
    for (const { row, cells: own, searched } of rows) {
      const visible = own.filter((cell) => chosenGpus.has(data.columns[cell.columnNumber].gpu));
      const matching = visible.filter(matches);
      row.hidden = !words.every((word) => searched.includes(word)) || (wanted !== "" && matching.length === 0);
      if (row.hidden) continue;
      shownRows += 1;
      shownCells += matching.length;
      for (const cell of visible) cell.button.classList.toggle("dim", !matches(cell));
    }
    for (const node of $("matrix").querySelectorAll("[data-gpu]")) node.hidden = !chosenGpus.has(Number(node.dataset.gpu));
    for (const chip of $("legend").querySelectorAll("button")) chip.setAttribute("aria-pressed", String(chip.dataset.filter === wanted));
    $("backend").value = wanted;
    $("empty").hidden = shownRows > 0;
    const of = shownRows === rows.length ? "" : ` of ${rows.length}`;
    $("counts").textContent = `${shownRows}${of} ${rows.length === 1 ? "model" : "models"}, ${count(shownCells, "cell")}${wanted ? " that match" : ""}`;
    if (opened && isVisible(opened)) opened.button.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (!focusable() || focusable().closest("[hidden]")) moveTo(firstVisible(), false);
  }

  function want(value) {
    wanted = wanted === value ? "" : value;
    filter();
  }

  // What there is to choose from depends on the engine.
  function drawLegend() {
    const tally = new Map();
    const add = (key) => tally.set(key, (tally.get(key) || 0) + 1);
    for (const cell of cells) {
      cell.backends.forEach((name) => add(`backend:${name}`));
      cell.marks.forEach((mark) => add(`mark:${mark}`));
    }
    const chip = (value, swatch, label) => {
      const button = make("button", { type: "button", "data-filter": value, "aria-pressed": "false" }, swatch, label,
        make("span", { class: "count" }, String(tally.get(value))));
      button.addEventListener("click", () => want(value));
      return button;
    };
    const backends = make("optgroup", { label: "Backends" }), marks = make("optgroup", { label: "Marks" });
    $("legend").replaceChildren();
    for (const name of data.backends) {
      if (!tally.has(`backend:${name}`)) continue;
      backends.append(make("option", { value: `backend:${name}` }, name));
      $("legend").append(chip(`backend:${name}`, make("span", { class: `swatch ${colorOf(name)}` }), name));
    }
    $("legend").append(make("span", { class: "gap" }));
    for (const [mark, { sign, label }] of Object.entries(MARKS)) {
      if (!tally.has(`mark:${mark}`)) continue;
      marks.append(make("option", { value: `mark:${mark}` }, label));
      $("legend").append(chip(`mark:${mark}`, make("span", { class: "swatch mark", "aria-hidden": "true" }, sign), label));
    }
    $("backend").replaceChildren(make("option", { value: "" }, "all"), backends, ...(marks.children.length ? [marks] : []));
    if (wanted !== "" && !tally.has(wanted)) wanted = "";
  }

  function drawFilters() {
    $("engine").parentNode.hidden = data.policies.length < 2;
    data.policies.forEach(({ title }, number) => $("engine").append(make("option", { value: number }, title)));
    $("engine").addEventListener("change", () => answerBy(Number($("engine").value)));
    $("backend").addEventListener("change", () => { wanted = $("backend").value; filter(); });
    $("search").addEventListener("input", filter);
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("clear").addEventListener("click", () => {
      wanted = "";
      $("search").value = "";
      data.gpus.forEach((_, number) => chosenGpus.add(number));
      for (const box of $("gpus").querySelectorAll("input")) box.checked = true;
      filter();
      $("search").focus();
    });
    $("gpus").hidden = data.gpus.length < 2;
    data.gpus.forEach((gpu, number) => {
      const box = make("input", { type: "checkbox", checked: true, value: gpu.key });
      box.addEventListener("change", () => {
        if (box.checked) chosenGpus.add(number);
        else chosenGpus.delete(number);
        filter();
      });
      $("gpus").append(make("label", {}, box, gpu.key));
    });
  }

  // The engine and release that answers; what is open stays open.

  function answerBy(number) {
    const before = opened, at = current;
    policy = data.policies[number];
    $("engine").value = String(number);
    current = opened = null;
    draw();
    const again = (cell) => cell && cells.find((each) => each.modelNumber === cell.modelNumber && each.columnNumber === cell.columnNumber);
    if (again(before)) open(again(before));
    else if (before) closePanel();
    else moveTo(again(at) || firstVisible(), false);
  }

  function draw() {
    drawTable();
    drawLegend();
    filter();
  }

  // The panel.

  let opened = null;

  function section(title, ...children) {
    return [make("h3", {}, title), ...children];
  }

  function facts(pairs) {
    return make("dl", {}, ...pairs.flatMap(([name, value, kind]) => [
      make("dt", {}, kind ? make("span", { class: `key ${kind}` }) : "", name), make("dd", {}, value)]));
  }

  function command(line) {
    const code = make("code", {}, line), button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(line);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    return make("div", { class: "command" }, code, button);
  }

  const FALLBACKS = {
    passed: "a backend of higher priority fits this GPU and format, but one of its conditions is not met (below)",
    method: "the engine's usual method for this checkpoint has a backend of higher priority, but is replaced in this deployment",
    request: "another backend than the requested one",
    emulation: "emulation dequantizes the weights and multiplies in 16 bits: slow",
    none: "no backend",
  };

  function drawChoice(layers, answer, several) {
    const chosen = answer.state === "chosen";
    const box = make("div", { class: `choice ${chosen ? colorOf(answer.backend) : answer.state}` });
    box.append(make("div", {}, make("span", { class: "backend" }, chosen ? answer.backend : `${MARKS[answer.state].sign} ${MARKS[answer.state].label}`),
      chosen && says(answer) ? make("span", { class: "usual" }, answer.usual) : ""));
    if (several) box.append(make("p", { class: "layers" }, `layers ${layers}`));
    for (const reason of answer.because) box.append(make("p", {}, make("span", { class: "soft" }, "because "), text(reason)));
    if (chosen && answer.fallback !== null)
      box.append(make("p", { class: "warn" }, make("span", { class: "tag" }, `${MARKS.fallback.sign} fallback: `), text(answer.remark) || FALLBACKS[answer.fallback] || answer.fallback));
    else if (answer.remark !== null)
      box.append(make("p", { class: "warn" }, make("span", { class: "tag" }, chosen ? "note: " : "closest: "), text(answer.remark)));
    if (answer.facts.length) box.append(facts(answer.facts.map(([name, value]) => [name, text(value)])));
    return box;
  }

  function drawMemory(memory, fits) {
    if (!memory) return [];
    const [device, usable, experts, others, left, smallest] = memory;
    const nodes = [];
    if (device) {
      const total = Math.max(device, experts + (others || 0));
      const bar = make("div", { class: `memory${fits === false ? " over" : ""}`, role: "img", "aria-label": "shares of the GPU's memory" });
      for (const [kind, bytes] of [["experts", experts], ["others", others || 0], ["left", Math.max(0, left || 0)]]) {
        const piece = make("span", { class: kind });
        piece.style.width = `${(100 * bytes) / total}%`;
        if (bytes > 0) bar.append(piece);
      }
      nodes.push(bar);
    }
    const pairs = [["experts", gib(experts), "experts"], ["other weights", others === null ? "unknown: not in the headers that were read" : gib(others), "others"]];
    if (left !== null) {
      const share = policy.memory_option && device && usable ? ` at ${policy.memory_option} ${Number((usable / device).toPrecision(2))}` : "";
      pairs.push(left > 0 ? ["left for KV cache", `${gib(left)}${share}`, "left"] : ["missing", make("span", { class: "wrong" }, `${gib(-left)}${share}`)]);
    }
    if (device) {
      pairs.push(["GPU memory", gib(device)]);
      pairs.push(["smallest TP that fits", smallest === null ? make("span", { class: "wrong" }, "none of those tried") : `TP ${smallest}`]);
    }
    return section("Memory per GPU", fits === false ? make("p", { class: "wrong" }, make("span", { class: "tag" }, "! does not fit")) : "", ...nodes, facts(pairs));
  }

  function drawCandidates(answer, title) {
    if (answer.candidates === null || !data.lists[answer.candidates].length) return [];
    const list = make("ol", { class: "candidates" });
    let chosenSeen = false;
    for (const [place, number] of data.lists[answer.candidates].entries()) {
      const candidate = data.candidates[number];
      const isChosen = !chosenSeen && answer.state === "chosen" && candidate.usable && candidate.backend === answer.backend && candidate.experts === (answer.experts || "");
      chosenSeen = chosenSeen || isChosen;
      const verdict = isChosen ? make("span", { class: "good" }, " \u2014 chosen") : candidate.usable ? make("span", { class: "soft" }, " \u2014 supported, lower priority") : "";
      const usual = says(candidate) ? make("span", { class: "soft" }, ` (${candidate.usual})`) : "";
      const about = make("div", {}, make("span", { class: "name" }, candidate.backend), usual, verdict, make("div", { class: "class" }, candidate.experts || ""));
      if (candidate.reasons.length) about.append(make("ul", {}, ...candidate.reasons.map((reason) => make("li", {}, text(reason)))));
      list.append(make("li", { class: isChosen ? "chosen" : null }, make("span", { class: "rank" }, String(place + 1)), about));
    }
    return section(title, list);
  }

  function panelTop(title) {
    const close = make("button", { type: "button", "aria-label": "Close" }, "\u00d7");
    close.addEventListener("click", closePanel);
    return make("div", { class: "top" }, make("h2", { id: "panel-title" }, title), close);
  }

  function showPanel(...children) {
    $("panel").replaceChildren(...children.filter((child) => child !== ""));
    $("panel").hidden = false;
    $("panel").scrollTop = 0;
  }

  function mark(cell) {
    if (opened) opened.button.removeAttribute("aria-current");
    opened = cell;
    if (cell) cell.button.setAttribute("aria-current", "true");
  }

  function open(cell) {
    const model = data.models[cell.modelNumber], column = data.columns[cell.columnNumber], gpu = data.gpus[column.gpu];
    const entry = data.entries[cell.entry], parts = answersOf(cell.entry);
    const works = parts.every(([, answer]) => answer.state === "chosen") && entry.fits !== false;
    const serve = data.shared[policy.commands][cell.modelNumber] + data.shared[policy.options][cell.columnNumber];
    mark(cell);
    moveTo(cell, false);
    showPanel(
      panelTop(model.name),
      make("p", { class: "where" }, `${gpu.name}, ${gpu.arch}, ${column.label} \u00b7 ${policy.title}`),
      make("p", { class: "where" }, `${model.format}; ${model.sizes}`),
      ...parts.map(([layers, answer]) => drawChoice(layers, answer, parts.length > 1)),
      ...drawMemory(entry.memory === null ? null : data.memories[entry.memory], entry.fits),
      ...section("Commands", works ? command(serve) : make("p", { class: "soft" }, entry.fits === false ? "None to serve it: the weights do not fit." : "None to serve it: some layers have no backend."), command(model.explain + column.explain + policy.explain)),
      ...parts.flatMap(([layers, answer]) => drawCandidates(answer, `Candidates in priority order${parts.length > 1 ? `, layers ${layers}` : ""}`)),
      ...(model.note ? section("About the checkpoint", make("p", {}, model.note)) : []),
    );
    cell.button.scrollIntoView({ block: "nearest", inline: "nearest" });
    remember(`${model.name}/${gpu.key}/${column.label}${policy === data.policies[0] ? "" : `/${policy.name}`}`);
  }

  function openAbout() {
    mark(null);
    const key = (...names) => names.flatMap((name) => [make("kbd", {}, name), " "]);
    const list = (texts) => make("ul", { class: "plain" }, ...texts.map((line) => make("li", {}, line)));
    showPanel(
      panelTop("About this page"),
      make("p", {}, `Each cell names the fused-MoE backend that ${policy.title} chooses for the experts of a checkpoint, by the rules of that release, from its config and tensor headers. Nothing was run for it. A click shows the reasons.`),
      ...section("Made by", command(data.command), facts([["moectl", data.moectl], ["rules", data.policies.map((each) => each.name).join(", ")], ["data", `explain --json, schema ${data.schema_version}`]])),
      ...(data.warnings.length ? section("Warnings", list(data.warnings)) : []),
      ...(data.assumptions.length ? section("Assumptions", list(data.assumptions)) : []),
      ...section("Marks", facts([
        ["! does not fit", "the known weights exceed what the engine may use of one GPU's memory; also hatched"],
        ["\u2193 fallback", "a better backend for this GPU and format was passed over, or the choice is emulation"],
        ["\u00d7 no backend", "no candidate passes its checks"],
        ["\u2013 refused", "the engine or the shapes do not allow the deployment"]])),
      ...section("Memory", make("p", {}, "GiB as nvidia-smi counts. Other weights are those of the tensor headers divided over the GPUs; built-in models list their MoE layers alone, so for them what is left includes attention and embeddings. Activations are not counted.")),
      ...section("Keys", facts([["search", make("span", {}, ...key("/"))], ["move", make("span", {}, ...key("\u2190", "\u2191", "\u2192", "\u2193", "Home", "End"))],
        ["reasons", make("span", {}, ...key("Enter"))], ["close", make("span", {}, ...key("Esc"))]])),
    );
    remember("");
    $("panel").focus();
  }

  function closePanel() {
    const back = opened ? opened.button : $("about-button");
    mark(null);
    $("panel").hidden = true;
    remember("");
    back.focus();
  }

  function remember(place) {
    history.replaceState(null, "", place ? `#${place.split("/").map(encodeURIComponent).join("/")}` : location.href.split("#")[0]);
  }

  function openRemembered() {
    let wantedPlace = "";
    try { wantedPlace = location.hash.slice(1).split("/").map(decodeURIComponent).join("/"); } catch { return; }
    if (!wantedPlace) return;
    const cut = wantedPlace.lastIndexOf("/");
    const engine = data.policies.findIndex(({ name }) => name === wantedPlace.slice(cut + 1));
    if (engine >= 0) wantedPlace = wantedPlace.slice(0, cut);
    if (policy !== data.policies[Math.max(0, engine)]) answerBy(Math.max(0, engine));
    const place = ({ modelNumber, columnNumber }) => {
      const column = data.columns[columnNumber];
      return `${data.models[modelNumber].name}/${data.gpus[column.gpu].key}/${column.label}`;
    };
    const cell = cells.find((candidate) => place(candidate) === wantedPlace);
    if (cell) open(cell);
  }

  // Keys: one cell of the grid is in the tab order, arrows move it.

  let current = null;
  const focusable = () => current && current.button;
  const isVisible = (cell) => !cell.holder.hidden && !cell.holder.parentNode.hidden;
  const firstVisible = () => cells.find(isVisible) || null;

  function moveTo(cell, focus = true) {
    if (current) current.button.tabIndex = -1;
    current = cell;
    if (!cell) return;
    cell.button.tabIndex = 0;
    if (focus) cell.button.focus();
  }

  function neighbour(cell, key) {
    const inRow = rows[cell.modelNumber].cells.filter(isVisible);
    const inColumn = cells.filter((other) => other.columnNumber === cell.columnNumber && isVisible(other));
    const across = inRow.indexOf(cell), down = inColumn.indexOf(cell);
    return { ArrowLeft: inRow[across - 1], ArrowRight: inRow[across + 1], ArrowUp: inColumn[down - 1], ArrowDown: inColumn[down + 1],
      Home: inRow[0], End: inRow[inRow.length - 1] }[key];
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches("input[type=search], select");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      $("search").focus();
      $("search").select();
    } else if (event.key === "Escape" && !$("panel").hidden && !(typing && event.target.value)) {
      event.preventDefault();
      closePanel();
    } else if (event.target.classList.contains("cell") && current) {
      const next = neighbour(current, event.key);
      if (!next) return;
      event.preventDefault();
      moveTo(next);
      if (!$("panel").hidden && opened) open(next);
    }
  }

  drawFilters();
  draw();
  document.addEventListener("keydown", onKey);
  $("about-button").addEventListener("click", openAbout);
  window.addEventListener("hashchange", openRemembered);
  openRemembered();
})();
