"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  const byId = (id) => document.getElementById(id);

  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const leading = /^\s*[<>≤≥~≈]?\s*([-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)/i;
  const numberOf = (cell) => {
    if (cell.dataset.number !== undefined) return Number(cell.dataset.number);
    const found = cell.textContent.match(leading);
    return found ? Number(found[1].replace("−", "-").replaceAll(",", "")) : NaN;
  };

  const sortBy = (table, column, direction) => {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const cell = row.cells[column];
      const none = "none" in cell.dataset;
      return { row, none, text: cell.textContent.trim(), number: none ? NaN : numberOf(cell) };
    });
    const numeric = rows.every((r) => r.none || !Number.isNaN(r.number));
    rows.sort((a, b) => {
      if (a.none || b.none) return a.none - b.none; // what is unknown stays last either way
      const order = numeric ? a.number - b.number : 0;
      return direction * (order || collator.compare(a.text, b.text));
    });
    rows.forEach((r, i) => r.row.classList.toggle("later", i >= Number(table.dataset.lines)));
    body.remove(); // outside the page the order of thousands of rows costs nothing
    body.append(...rows.map((r) => r.row));
    table.append(body);
  };

  const watchTables = () => {
    for (const table of document.querySelectorAll("table.sortable")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, column) => {
        head.querySelector("button").addEventListener("click", () => {
          const up = head.getAttribute("aria-sort") !== "ascending";
          heads.forEach((other) => other.removeAttribute("aria-sort"));
          head.setAttribute("aria-sort", up ? "ascending" : "descending");
          sortBy(table, column, up ? 1 : -1);
        });
      });
      const more = table.parentElement.querySelector(".all-lines");
      if (more)
        more.addEventListener("click", () => {
          table.classList.remove("short");
          more.remove();
          table.parentElement.focus();
        });
    }
  };

  const watchDetails = () => {
    const all = [...document.querySelectorAll("details.finding")];
    const follow = () => {
      const wanted = all.find((one) => location.hash === `#${one.id}`);
      if (!wanted) return;
      wanted.open = true;
      wanted.scrollIntoView();
      wanted.querySelector("summary").focus({ preventScroll: true });
    };
    addEventListener("hashchange", follow);
    for (const link of document.querySelectorAll(".sortable a[href^='#finding-']"))
      link.addEventListener("click", () => setTimeout(follow)); // also where the address stays
    follow();

    const button = byId("all");
    if (button)
      button.addEventListener("click", () => {
        const open = button.getAttribute("aria-pressed") !== "true";
        all.forEach((one) => (one.open = open));
        button.setAttribute("aria-pressed", String(open));
        button.textContent = open ? "Close all" : "Open all";
      });

    // Paper cannot be clicked: everything is open while printing.
    let closed = null;
    const unfold = (printing) => {
      if (printing && !closed) {
        closed = [...document.querySelectorAll("details:not([open])")];
        closed.forEach((one) => (one.open = true));
      } else if (!printing && closed) {
        closed.forEach((one) => (one.open = false));
        closed = null;
      }
    };
    const print = matchMedia("print");
    print.addEventListener("change", () => unfold(print.matches));
    addEventListener("beforeprint", () => unfold(true));
    addEventListener("afterprint", () => unfold(false));
  };

  const watchPictures = () => {
    const box = byId("lightbox");
    const stage = byId("lightbox-stage");
    let series = [];
    let at = 0;

    const enlarged = (part) => {
      const figure = document.createElement("figure");
      const copy = part.cloneNode(true);
      figure.append(copy);
      if (part.dataset.what) {
        const caption = document.createElement("figcaption");
        caption.textContent = part.dataset.what;
        figure.append(caption);
      }
      return figure;
    };
    const show = (index) => {
      at = (index + series.length) % series.length;
      const opener = series[at];
      const parts = [...opener.querySelectorAll("[data-what]")];
      stage.replaceChildren(...parts.map(enlarged));
      stage.className = opener.closest(".drawing") ? "drawing-only" : "";
      const label = opener.parentElement.querySelector(".label");
      byId("lightbox-name").textContent = (
        label ? label.querySelector(".name") : opener.parentElement.querySelector("h3")
      ).textContent;
      byId("lightbox-note").textContent = label
        ? [...label.querySelectorAll(".psnr, .mark")].map((one) => one.textContent.trim()).join(", ")
        : "";
      byId("lightbox-count").textContent = `${at + 1} of ${series.length}`;
    };
    const step = (by) => () => show(at + by);

    for (const opener of document.querySelectorAll(".zoom"))
      opener.addEventListener("click", () => {
        series = [...opener.closest("[data-gallery]").querySelectorAll(".zoom")];
        show(series.indexOf(opener));
        const alone = series.length < 2;
        byId("lightbox-back").hidden = byId("lightbox-on").hidden = alone;
        box.showModal();
      });
    byId("lightbox-back").addEventListener("click", step(-1));
    byId("lightbox-on").addEventListener("click", step(1));
    byId("lightbox-close").addEventListener("click", () => box.close());
    box.addEventListener("click", (event) => {
      if (event.target === box) box.close(); // beside the frame
    });
    box.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      show(at + by);
    });
    box.addEventListener("close", () => {
      stage.replaceChildren();
      series[at].focus(); // the picture looked at last, so that reading goes on there
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    watchTables();
    watchDetails();
    watchPictures();
  });
})();
