// What the page gains with a script: theme, read-outs on charts, the mask over time, plain CSV downloads.
// Text from runs only ever passes through textContent.
"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.querySelector(".tip");
  const readOut = document.getElementById("read-out");
  const MINUS = "\u2212";
  root.classList.add("has-script");

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // A mean to two digits of its spread, or to four digits without one; with a true minus sign.
  function write(value, percent, deviation) {
    const factor = percent ? 100 : 1;
    const unit = percent ? "\u202f%" : "";
    const size = Math.abs(factor * value);
    const sign = (text) => text.replace(/-/g, MINUS);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return sign((factor * value).toExponential(2)) + unit;
    if (!deviation) return sign(String(Number((factor * value).toPrecision(4)))) + unit;
    const places = Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(factor * deviation))));
    return sign(`${(factor * value).toFixed(places)} ± ${(factor * deviation).toFixed(places)}`) + unit;
  }

  // ---- theme: the reader's system decides until the button does
  const themeButton = document.querySelector(".theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function showTheme() {
    themeButton.setAttribute("aria-pressed", String(isDark()));
    themeButton.setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
    themeButton.firstElementChild.textContent = isDark() ? "Light" : "Dark";
  }
  function remembered(theme) {
    try {
      if (theme) localStorage.setItem("nmsparse-theme", theme);
      return localStorage.getItem("nmsparse-theme");
    } catch {
      return null; // storage may be off for files; then the choice lasts as long as the page
    }
  }
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // ---- the box beside the pointer
  function showTip(x, y, title, lines) {
    tip.replaceChildren(make("p", "", title));
    for (const line of lines) {
      const row = make("div", "g" + line.group);
      row.append(make("span", "swatch"), make("span", "", line.name), make("b", "", line.text));
      tip.append(row);
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    const top = Math.min(innerHeight - box.height - 8, Math.max(8, y - box.height / 2));
    tip.style.transform = `translate(${Math.max(8, left)}px, ${top}px)`;
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- charts
  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle; else high = middle;
    }
    return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
  }

  function place(axis, value) {
    if (!axis.log) return (value - axis.low) / (axis.high - axis.low);
    return value > 0 ? Math.log(value / axis.low) / Math.log(axis.high / axis.low) : 0;
  }

  function enhanceChart(section, figure, facts, names) {
    const frame = figure.querySelector(".frame");
    frame.tabIndex = 0;
    frame.setAttribute("aria-roledescription", "chart, use the arrow keys to read values");
    let at = null;
    const view = () => (figure.querySelector(".views input:checked") || { value: Object.keys(facts.variants)[0] }).value;
    const variant = () => frame.querySelector(`.variant[data-view="${view()}"]`);
    const isShown = (series) => section.querySelector(`.legend input[data-group="${series.group}"]`).checked;
    const shown = () => facts.series.filter(isShown);

    function clear() {
      for (const mark of frame.querySelectorAll(".cross, .cross-dot")) mark.remove();
      hideTip();
    }

    function stepsInView() {
      const { x } = facts.variants[view()];
      const all = new Set(shown().flatMap((series) => series.steps));
      return [...all].filter((step) => step >= x.low && step <= x.high).sort((a, b) => a - b);
    }

    function show(step, clientX, clientY) {
      clear();
      at = step;
      const { x, y } = facts.variants[view()];
      const plot = variant();
      const cross = make("div", "cross");
      cross.style.left = 100 * place(x, step) + "%";
      plot.append(cross);
      const lines = [];
      for (const series of shown()) {
        const index = nearest(series.steps, step);
        if (step < series.steps[0] || step > series.steps[series.steps.length - 1]) continue;
        const value = series.means[index];
        const name = names[series.group] + (series.note ? ` (${series.note})` : "");
        const text = write(value, facts.percent, series.deviations && series.deviations[index]);
        lines.push({ group: series.group, name, value, text });
        const height = place(y, value);
        if (height < 0 || height > 1 || (y.log && value <= 0)) continue;
        const dot = make("div", "cross-dot g" + series.group);
        dot.style.left = 100 * place(x, series.steps[index]) + "%";
        dot.style.top = 100 * (1 - height) + "%";
        plot.append(dot);
      }
      lines.sort((a, b) => b.value - a.value);
      const box = plot.getBoundingClientRect();
      showTip(clientX ?? box.left + box.width * place(x, step), clientY ?? box.top + box.height / 2, `step ${step}`, lines);
      return lines;
    }

    frame.addEventListener("pointermove", (event) => {
      const box = variant().getBoundingClientRect();
      const { x } = facts.variants[view()];
      const steps = stepsInView();
      if (!steps.length || event.clientX < box.left - 20 || event.clientX > box.right + 20) return clear();
      const step = x.low + ((event.clientX - box.left) / box.width) * (x.high - x.low);
      show(steps[nearest(steps, step)], event.clientX, event.clientY);
    });
    frame.addEventListener("pointerleave", clear);
    frame.addEventListener("blur", clear);
    frame.addEventListener("keydown", (event) => {
      const steps = stepsInView();
      if (event.key === "Escape") return clear();
      if (!steps.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
      event.preventDefault();
      const now = at === null ? steps.length - 1 : nearest(steps, at);
      const move = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1 }[event.key];
      const step = steps[Math.min(steps.length - 1, Math.max(0, move))];
      const lines = show(step);
      readOut.textContent = `step ${step}: ` + lines.map((line) => `${line.name} ${line.text}`).join("; ");
    });
    figure.addEventListener("change", clear);
  }

  // ---- heat maps
  function enhanceHeat(panel, facts, names) {
    const plot = panel.querySelector(".heat-plot");
    plot.addEventListener("pointermove", (event) => {
      const box = plot.querySelector("svg").getBoundingClientRect();
      const column = Math.floor(((event.clientX - box.left) / box.width) * facts.steps.length);
      const row = Math.floor(((event.clientY - box.top) / box.height) * facts.layers.length);
      const value = (facts.values[row] || [])[column];
      if (value === undefined) return hideTip();
      const text = value === null ? "not recorded" : write(value, true);
      showTip(event.clientX, event.clientY, `step ${facts.steps[column]}, ${names[facts.group]}`, [{ group: facts.group, name: facts.layers[row], text }]);
    });
    plot.addEventListener("pointerleave", hideTip);
  }

  // ---- the mask over time
  function decode(film, digits) {
    const bits = new Uint8Array(film.rows * film.columns);
    for (let i = 0; i < bits.length; i++) bits[i] = (parseInt(digits[i >> 2], 16) >> (3 - (i & 3))) & 1;
    return bits;
  }

  function cellPath(film, before, now, old, fresh) {
    const parts = [];
    for (let y = 0; y < film.rows; y++) {
      for (let x = 0; x < film.columns; x++) {
        const start = x;
        while (x < film.columns && before[y * film.columns + x] === old && now[y * film.columns + x] === fresh) x++;
        if (x > start) parts.push(`M${start} ${y}h${x - start}`);
      }
    }
    return parts.join("");
  }

  function drawFilm(panel, film, step, base) {
    let index = film.frames.findLastIndex((frame) => frame.step <= step);
    if (index < 0) index = 0;
    const now = film.frames[index];
    const then = film.frames[base === "first" ? 0 : Math.max(0, index - 1)];
    const [a, b] = [decode(film, then.bits), decode(film, now.bits)];
    panel.querySelector(".kept").setAttribute("d", cellPath(film, a, b, 1, 1));
    panel.querySelector(".new").setAttribute("d", cellPath(film, a, b, 0, 1));
    panel.querySelector(".gone").setAttribute("d", cellPath(film, a, b, 1, 0));
    const share = (count) => ((100 * count) / b.length).toFixed(2) + "%";
    const kept = b.reduce((sum, bit) => sum + bit, 0);
    const changed = b.reduce((sum, bit, i) => sum + (bit !== a[i]), 0);
    const since = now === then ? "the first record" : `${share(changed)} changed since step ${then.step}`;
    panel.querySelector(".film-words").textContent = `step ${now.step}: ${((100 * kept) / b.length).toFixed(1)}% kept, ${since}`;
  }

  function enhanceMasks(figure, layers) {
    const slider = figure.querySelector(".mask-step");
    const play = figure.querySelector(".mask-play");
    const select = figure.querySelector(".mask-layer");
    let timer = null;
    const layer = () => Number(select ? select.value : 0);

    function draw() {
      const facts = layers[layer()];
      const step = facts.steps[Number(slider.value)];
      const base = figure.querySelector(".views input:checked").value;
      figure.querySelector(".mask-now").textContent = `step ${step}`;
      slider.setAttribute("aria-valuetext", `step ${step}`);
      for (const films of figure.querySelectorAll(".films")) films.classList.toggle("is-shown", Number(films.dataset.layer) === layer());
      const panels = figure.querySelectorAll(`.films[data-layer="${layer()}"] .film`);
      panels.forEach((panel, i) => drawFilm(panel, facts.films[i], step, base));
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
      play.setAttribute("aria-pressed", "false");
    }

    function advance() {
      if (slider.value === slider.max) return stop();
      slider.value = Number(slider.value) + 1;
      draw();
    }

    play.addEventListener("click", () => {
      if (timer !== null) return stop();
      if (slider.value === slider.max) slider.value = 0;
      draw();
      play.textContent = "Pause";
      play.setAttribute("aria-pressed", "true");
      timer = setInterval(advance, 350);
    });
    slider.addEventListener("input", () => { stop(); draw(); });
    figure.querySelector(".views").addEventListener("change", draw);
    if (select) select.addEventListener("change", () => {
      stop();
      slider.max = layers[layer()].steps.length - 1;
      slider.value = slider.max;
      figure.dataset.layer = layer();
      draw();
    });
    draw();
  }

  // ---- downloads: packed data becomes a plain CSV where the browser can unpack it
  async function unpack(link) {
    const bytes = Uint8Array.from(atob(link.href.split(",")[1]), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const plain = make("a");
    plain.href = URL.createObjectURL(await new Response(stream).blob());
    plain.download = link.dataset.packed;
    plain.click();
    setTimeout(() => URL.revokeObjectURL(plain.href), 10000);
  }
  if ("DecompressionStream" in window) {
    for (const link of document.querySelectorAll("a[data-packed]")) {
      link.addEventListener("click", (event) => { event.preventDefault(); unpack(link); });
    }
  }

  for (const section of document.querySelectorAll(".section")) {
    const facts = data.sections[Number(section.dataset.section)];
    for (const figure of section.querySelectorAll(".chart")) enhanceChart(section, figure, facts.charts[figure.dataset.chart], facts.groups);
    for (const panel of section.querySelectorAll(".heat-map")) enhanceHeat(panel, facts.heat[Number(panel.dataset.heat)], facts.groups);
    const masks = section.querySelector(".masks");
    if (masks) enhanceMasks(masks, facts.masks);
  }

  // closed details do not print
  addEventListener("beforeprint", () => { for (const details of document.querySelectorAll("details")) details.open = true; });
})();
