// What every client's file shares, as report.py for Python: the arguments, and how it says what worked.

export const [url, model] = process.argv.slice(2); // the server's address with /v1, and the model's name
export const CODE = 'if __name__ == "__main__":'; // the demo ends its answer to this by itself
export const MAX_TOKENS = 80;

export function valid({ n, how }) {
  check(Number.isInteger(n) && n >= 1 && n <= 9, `n is ${n}`);
  check(["loop", "call"].includes(how), `how is ${how}`);
}

export function check(holds, said) {
  if (!holds) throw new Error(said);
}

/** Try each, and print a line of JSON: what was tried, and the error, or null. */
export async function report(tries) {
  for (const [what, attempt] of Object.entries(tries)) {
    let error = null;
    try {
      await attempt();
    } catch (failure) {
      error = `${failure.name}: ${String(failure.message).replace(/\s+/g, " ")}`.slice(0, 300);
    }
    console.log(JSON.stringify({ what, error }));
  }
}
