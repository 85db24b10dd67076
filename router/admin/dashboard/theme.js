// Before anything is painted: light or dark, where somebody has chosen. Without a choice the system's holds.
try {
  const chosen = localStorage.getItem("warmroute-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is forbidden here: the system's theme it is
}
