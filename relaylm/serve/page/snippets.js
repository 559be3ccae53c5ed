// One request as a command, as Python and as curl; each is right when pasted.

const shell = text => /^[\w.:/@%+=,-]+$/.test(text) ? text : "'" + String(text).replaceAll("'", "'\\''") + "'";
const flag = name => "--" + ({ model: "family" }[name] ?? name).replace("_", "-");

// A flag's value that begins with a dash must be joined to it.
function cli(body) {
  const words = Object.entries(body).map(([name, value]) => {
    const text = String(value);
    return flag(name) + (text.startsWith("-") ? "=" : " ") + shell(text);
  });
  return ["relaylm sample", ...words].join(" \\\n  ");
}

// JSON's strings are Python's.
function python({ model, schedule, ...options }) {
  const value = (name, given) => name === "steps" && given === "inf" ? 'float("inf")' : JSON.stringify(given);
  const words = Object.entries(options).map(([name, given]) => "    " + name + "=" + value(name, given) + ",\n");
  return "import relaylm\n\nfamily = relaylm.Family.load(" + JSON.stringify(model) + ")\n"
    + "samples = relaylm.sample(\n    family,\n    " + JSON.stringify(schedule) + ",\n" + words.join("") + ")\n"
    + "print(samples.texts[0], samples.cost.calls)\n";
}

function curl(body, { key }) {
  const address = new URL("v1/denoise", document.baseURI).href.replace(/#.*/, "");
  const bearer = key ? ' \\\n  -H "Authorization: Bearer $RELAYLM_API_KEY"' : "";
  return "curl -N " + shell(address) + " \\\n  -H 'Content-Type: application/json'" + bearer
    + " \\\n  -d " + "'" + JSON.stringify(body).replaceAll("'", "'\\''") + "'\n";
}

export const SNIPPETS = { cli, python, curl };
