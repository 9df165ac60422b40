// Opens what the page is made of: its style and script, deflated, which leaves a third of them to store.

/**
 * Put style and script into the page, where the script runs.
 * @param {string} packed base 85 of the deflated style, a NUL and the script
 */
export async function openPage(packed) {
  const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%.()*+-;[=]?@^_:{|}~";
  const words = new DataView(new ArrayBuffer(4 * Math.ceil(packed.length / 5)));
  for (let at = 0; at < packed.length; at += 5) {
    let word = 0;
    for (const digit of packed.slice(at, at + 5).padEnd(5, "~")) word = 85 * word + digits.indexOf(digit);
    words.setUint32((4 * at) / 5, word);
  }
  const bytes = words.buffer.slice(0, Math.floor((4 * packed.length) / 5));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const parts = (await new Response(stream).text()).split("\0");
  for (const [place, name] of ["style", "script"].entries()) {
    const part = document.createElement(name);
    part.textContent = parts[place];
    document.head.append(part);
  }
}
