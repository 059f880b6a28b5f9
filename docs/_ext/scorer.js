// Sphinx's weights. A search for --option prefers that option to pages that have its words, and a search for the words
// of a heading prefers that section to pages that have one of the words in a heading.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([, title, , , score, , kind]) => {
    const asked = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase();
    const isHeading = kind === "title" && title.toLowerCase().split(" > ").pop() === asked;
    return score + (asked.startsWith("--") && kind === "object" ? 15 : 0) + (isHeading ? 5 : 0);
  },
};
