// Tells each cell the heading of its column, which site.css shows where rows are cards.
for (const table of document.querySelectorAll(".md-typeset table")) {
  const headings = [...table.querySelectorAll("thead th")].map((th) => th.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr"))
    [...row.cells].forEach((cell, i) => {
      if (headings[i]) cell.dataset.heading = headings[i];
    });
}
