"""The examples of the OpenAPI document. A test posts each of them."""

PUT_TINY = {"spec": {"d_model": 4, "num_heads": 2, "seed": 7}}
ATTEND = {
    "layer": "tiny",
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    "causal": True,
    "reply": {"decimals": 3},
}
FIGURE = {**ATTEND, "tokens": {"query": ["the", "cat", "sat"]}, "figure": {"kind": "heads", "format": "svg"}}
ANALYSIS = {
    "layer": "tiny",
    "query": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]],
    "causal": True,
    "tokens": {"query": ["the", "cat", "saw", "the"]},
    "metrics": ["entropy", "confidence", "strongest_links", "previous_token_score", "zero_ablation"],
    "reply": {"decimals": 3},
}
PLAN = {"layer": "tiny", "query": {"shape": [2, 1000, 4]}, "causal": True, "outputs": ["output"]}
INFER = {
    "inputs": [{"name": "query", "shape": [1, 3, 4], "datatype": "FP32", "data": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]}],
    "parameters": {"causal": True, "reply": '{"decimals": 3}'},
}
LOAD = {"parameters": {"config": '{"d_model": 4, "num_heads": 2, "seed": 7}'}}
WORDS = {"text": "The cat sat on the mat", "layer": "default"}
