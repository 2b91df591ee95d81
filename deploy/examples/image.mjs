// A picture by JavaScript (Node 18 or later): waits for it and writes image-js.png.
import {writeFile} from "node:fs/promises";

const url = process.env.DITFLEET_URL ?? "http://127.0.0.1:8780";
const headers = {Authorization: `Bearer ${process.env.DITFLEET_KEY ?? "none"}`, "Content-Type": "application/json"};
const answer = await fetch(`${url}/v1/images/generations`, {
  method: "POST", headers, body: JSON.stringify({model: "demo", prompt: "a yellow star", response_format: "b64_json"})});
const body = await answer.json();
if (!answer.ok) throw new Error(body.error.message);
await writeFile("image-js.png", Buffer.from(body.data[0].b64_json, "base64"));
