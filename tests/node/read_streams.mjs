// Reads streams with the official clients: node read_streams.mjs URL API COUNT [CONTINUE]. One line of JSON for each
// stream: how many events came, the text in them, and the error that was raised, if one was. CONTINUE is how a stream is
// to go on on another replica.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, api, count, wish] = process.argv.slice(2);
const gpt = new OpenAI({ baseURL: `${url}/v1`, apiKey: "x", maxRetries: 0 });
const claude = new Anthropic({ baseURL: url, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const options = wish ? { headers: { "x-warmroute-stream-failover": wish } } : {};
const calls = {
  "/v1/chat/completions": () => gpt.chat.completions.create({ model: "m", messages, stream: true }, options),
  "/v1/completions": () => gpt.completions.create({ model: "m", prompt: "x", stream: true }, options),
  "/v1/responses": () => gpt.responses.create({ model: "m", input: "x", stream: true }, options),
  "/v1/messages": () => claude.messages.create({ model: "m", max_tokens: 8, messages, stream: true }, options),
};

for (let n = 0; n < Number(count); n++) {
  let events = 0;
  let said = "";
  let error = null;
  try {
    for await (const event of await calls[api]()) {
      events++;
      const choice = event.choices?.[0];
      said += choice?.delta?.content ?? choice?.text ?? event.delta?.text ?? "";
    }
  } catch (raised) {
    const official = raised instanceof OpenAI.APIError || raised instanceof Anthropic.APIError;
    error = { official, name: raised.constructor.name, said: `${raised.message} ${JSON.stringify(raised.error ?? null)}` };
  }
  console.log(JSON.stringify({ events, said, error }));
}
