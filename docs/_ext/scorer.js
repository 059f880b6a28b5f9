// Sphinx's weights; and whoever searches for --option wants that option before pages that have its words.
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([, , , , score, , kind]) => {
    const asked = new URLSearchParams(window.location.search).get("q") || "";
    return score + (asked.startsWith("--") && kind === "object" ? 15 : 0);
  },
};
