// What the page asks of the server that it came from, which may end, be slow, or come back.

const CONNECTION_WAITS = [1000, 2000, 4000, 8000, 15_000];

/**
 * @param {number} time milliseconds @param {AbortSignal} [signal]
 * @returns {Promise<void>} fails as the signal does
 */
export function pause(time, signal) {
  return new Promise((done, fail) => {
    signal?.throwIfAborted();
    const timer = setTimeout(done, time);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      fail(signal.reason);
    });
  });
}

/** Events: "lost" as the server stops to answer, "found" as it answers again. */
export class Connection extends EventTarget {
  /** While the server does not answer: until it does. @type {Promise<void>|null} */
  missing = null;

  /** @param {typeof fetch} [send] @param {number[]} [waits] milliseconds between attempts; the last one repeats */
  constructor(send = (...what) => fetch(...what), waits = CONNECTION_WAITS) {
    super();
    this.send = send;
    this.waits = waits;
  }

  /**
   * An answer; of a server that is gone, as soon as it is back.
   * @param {string} path @param {AbortSignal} [signal]
   * @returns {Promise<{ok: boolean, status: number, bytes: ArrayBuffer}>}
   */
  async ask(path, signal) {
    for (;;) {
      while (this.missing) await this.missing;
      signal?.throwIfAborted();
      try {
        const answer = await this.send(path, { signal });
        return { ok: answer.ok, status: answer.status, bytes: await answer.arrayBuffer() };
      } catch (error) {
        if (signal?.aborted) throw error;
        this.missing ??= this.look();
      }
    }
  }

  /** Ask for nothing but a sign of life, less and less often. */
  async look() {
    this.dispatchEvent(new Event("lost"));
    for (let n = 0; ; n += 1) {
      await pause(this.waits[Math.min(n, this.waits.length - 1)]);
      try {
        if ((await this.send("", { method: "HEAD" })).ok) break;
      } catch {
        // not yet
      }
    }
    this.missing = null;
    this.dispatchEvent(new Event("found"));
  }
}
