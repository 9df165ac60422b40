// Opens what the page is made of: its style and script, deflated, which leaves a third of them to store.

/**
 * Put style and script into the page, where the script runs.
 * @param {string} packed base64 of the deflated style, a NUL and the script
 */
export async function openPage(packed) {
  const bytes = Uint8Array.from(atob(packed), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const parts = (await new Response(stream).text()).split("\0");
  for (const [place, name] of ["style", "script"].entries()) {
    const part = document.createElement(name);
    part.textContent = parts[place];
    document.head.append(part);
  }
}
