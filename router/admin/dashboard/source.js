// Where figures come from: three pages of the admin listener, asked with the token where there is one.

const ANSWER_MS = 8000; // for an answer, before the router counts as gone
const TOKEN = "warmroute-admin-token";

function stored() {
  try {
    return window.sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return ""; // storage is forbidden here
  }
}

// An answer that is no page of figures: its status, and what the router says of it.
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// No answer: nobody listens, or not in time.
export class Silence extends Error {}

export class Source {
  constructor() {
    this.token = stored();
  }

  keep(token) {
    this.token = token;
    try {
      if (token) sessionStorage.setItem(TOKEN, token);
      else sessionStorage.removeItem(TOKEN);
    } catch {
      // it holds until the page is loaded again
    }
  }

  // The answer as JSON, or as a blob. Throws Refusal and Silence, and SyntaxError where it is no JSON.
  async get(path, parameters = {}, { signal, as = "json" } = {}) {
    const asked = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined));
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    const limit = AbortSignal.timeout(ANSWER_MS);
    const sent = { headers, cache: "no-store", credentials: "omit", signal: signal ? AbortSignal.any([signal, limit]) : limit };
    const response = await fetch(String(asked) ? `${path}?${asked}` : path, sent).catch((error) => {
      throw new Silence(error.message);
    });
    if (response.ok) return response[as]();
    const body = await response.json().catch(() => ({}));
    throw new Refusal(response.status, body.error?.message ?? "");
  }
}
