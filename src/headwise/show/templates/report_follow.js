// A page that headwise report --serve hands out asks its own host whether the store has changed.
if (page.follow) {
  const sign = document.getElementById("follow");
  sign.textContent = "following the store";
  let reload = false;
  setInterval(async () => {
    if (document.hidden && !reload) return;
    try {
      const answer = await fetch("state", { cache: "no-store" });
      const state = (await answer.text()).trim();
      if (answer.ok && state !== page.follow) reload = true;
      sign.textContent = `following the store, looked at ${new Date().toLocaleTimeString()}`;
    } catch {
      sign.textContent = "the store is not served any more";
    }
    // Somebody who is typing is not interrupted.
    if (reload && !document.activeElement?.matches("input, select")) location.reload();
  }, 2000);
}
