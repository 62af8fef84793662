// Calls a server through the types that openapi-typescript made of openapi/openapi.json: `node attend.js http://127.0.0.1:8000`.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

const client = createClient<paths>({ baseUrl: process.argv[2] ?? "http://127.0.0.1:8000" });
const query = Array.from({ length: 3 }, (_, i) => Array.from({ length: 64 }, (_, j) => (64 * i + j + 1) / 100));

const plan = await client.POST("/attend/plan", { body: { query: { shape: [3, 64] }, causal: true } });
if (plan.error) throw new Error(plan.error.detail);
const output = plan.data.outputs["output"];
if (!plan.data.admitted || output?.shape.join() !== "3,64") throw new Error(`an odd plan: ${JSON.stringify(plan.data)}`);

const { data, error } = await client.POST("/attend", {
  body: { query, attend_mask: query.map((_, i) => query.map((_, j) => (j <= i ? 1 : 0))), outputs: ["output", "log_sum_exp"] },
});
if (error) throw new Error(error.detail);
const { layer, fully_masked_rows, log_sum_exp } = data;
if (!Array.isArray(log_sum_exp) || log_sum_exp.length !== 8) throw new Error("log_sum_exp has other heads than the layer");

const refused = await client.POST("/attend", { body: { query: [[1]] } });
const problem: components["schemas"]["ProblemDocument"] | undefined = refused.error;
if (problem?.status !== 422 || problem.errors[0]?.at !== "/query") throw new Error(`an odd refusal: ${JSON.stringify(problem)}`);

const held = await client.GET("/layers/{name}", { params: { path: { name: layer.name } } });
if (held.data?.fingerprint !== layer.fingerprint) throw new Error("the layer that answered is another one");
console.log(layer.name, fully_masked_rows, Object.keys(data).join());
