// What leaves its box on this page, in words; and what else a test wants to know of it.
() => {
  const content = document.querySelector(".md-content");
  const named = (e) => `${e.tagName.toLowerCase()} "${(e.textContent || "").trim().slice(0, 60)}"`;
  const shown = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
  const told = [];
  if (document.documentElement.scrollWidth > innerWidth + 1) told.push("the page is wider than the window");
  const edge = content.getBoundingClientRect().right + 1;
  for (const e of content.querySelectorAll("*")) {
    if (!shown(e)) continue;
    if (getComputedStyle(e).display !== "inline" && e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
      told.push(`${named(e)} needs ${e.scrollWidth} px and has ${e.clientWidth}`);
    // Spaces at the end of a line of code hang over its end, unseen.
    if (!e.closest("pre") && e.getBoundingClientRect().right > edge) told.push(`${named(e)} ends right of the text`);
  }
  const column = content.querySelector("article").getBoundingClientRect().width;
  const broken = [...content.querySelectorAll("td code")]
    .filter((e) => /^\w+$/.test(e.textContent) && shown(e) && e.getClientRects().length > 1)
    .map((e) => e.textContent);
  const pictures = [...content.querySelectorAll("img")].map((e) => [
    e.getAttribute("src").split("/").pop(), e.getBoundingClientRect().width / e.naturalWidth,
  ]);
  const colours = [...content.querySelectorAll("pre code")].map(
    (code) => new Set([...code.querySelectorAll("span")].map((e) => getComputedStyle(e).color)).size,
  );
  const paper = getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).map(Number);
  return { told, column, broken, pictures, colours, paper };
}
