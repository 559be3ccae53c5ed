// The server's API, as the page uses it. Addresses are relative: the page works below any path of a proxy.

export const access = { key: "" };

const headers = () => (access.key ? { Authorization: "Bearer " + access.key } : {});

async function refuse(answer) {
  let message = "the server answered " + answer.status;
  try { message = (await answer.json()).error.message; } catch { /* not ours: a proxy's page */ }
  throw Object.assign(new Error(message), { status: answer.status });
}

export async function get(path, query = {}, signal = undefined) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== undefined && value !== ""));
  const answer = await fetch(path + (words.size ? "?" + words : ""), { headers: headers(), signal });
  return answer.ok ? answer.json() : refuse(answer);
}

// The events of a denoising: {event, data}, as they arrive.
export async function* denoise(body, signal) {
  const answer = await fetch("v1/denoise", {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body), signal,
  });
  if (!answer.ok) await refuse(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n"), field = name => lines.filter(line => line.startsWith(name + ":"))
        .map(line => line.slice(name.length + 1).replace(/^ /, "")).join("\n");
      const data = field("data");
      if (data && data !== "[DONE]") yield { event: field("event"), data: JSON.parse(data) };
    }
  }
}
