"""The examples at the end of each command's help: a line of what it does, and the command.

A test parses every command line by click's own parser of its command.
"""

from __future__ import annotations

_LINES = """
# all steps on the built-in model, offline
treeopt demo
# in another folder, and the results for a program
treeopt demo -o first-run --json
# is everything there?
treeopt doctor
# for a program; the exit status is 4 where it cannot be used
treeopt doctor --json
# heads of Medusa, whose config names the base model
treeopt calibrate --heads FasterDecoding/medusa-vicuna-7b-v1.3 --prompts alpaca_eval
# a model without heads: an n-gram drafter is learned too
treeopt calibrate --model Qwen/Qwen3-0.6B --prompts prompts.jsonl -o qwen.safetensors
# a drafter for a model without heads
treeopt learn --model Qwen/Qwen3-0.6B --prompts prompts.jsonl
# with a smaller model as draft model
treeopt learn --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts alpaca_eval --limit 100
# the shards of `treeopt calibrate --shard i/2`
treeopt merge calibration.0-of-2.safetensors calibration.1-of-2.safetensors
# calibrations of other prompts
treeopt merge code.safetensors chat.safetensors -o both.safetensors
# of the files of `treeopt demo`
treeopt report demo
# of a tree, its traces and its validation
treeopt report --calibration calibration.safetensors --tree tree.yaml --validation validate.json
# the default sizes, on this machine
treeopt profile --heads FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16
# per-step trees of a learned drafter
treeopt profile --drafter drafter.safetensors --kind dynamic
# 64 nodes, from calibration.safetensors
treeopt build --nodes 64 -o tree.yaml
# the fastest size on this machine
treeopt build --nodes auto --profile profile.yaml -o fastest.yaml
# under the limits of an engine
treeopt build --nodes 32 --for trtllm -o trtllm.yaml
# tokens per step by nodes
treeopt curve --largest 128
# with overhead and speedup
treeopt curve --profile profile.yaml -o speedup.svg
# a model on a device that is not at hand
treeopt plan --model vicuna-7b --device-preset a100-80gb-pcie --num-heads 5
# a device by its figures
treeopt plan --model llama-2-7b --device-spec flops=312e12,bandwidth=1935e9 --batch-size 1,8
# a published tree
treeopt compile mc_sim_7b_63 -o mc_sim.safetensors
# a tree that was built
treeopt compile tree.yaml
# as SVG
treeopt render tree.yaml -o tree.svg
# one decoding step, with its tokens
treeopt render tree.yaml --example "Once upon a time" -o step.svg
# a tree for Medusa
treeopt export tree.yaml --for medusa -o choices.py
# settings of vLLM, from traces
treeopt export --for vllm --calibration calibration.safetensors --profile profile.yaml
# a list of paths
treeopt import choices.py -o tree.yaml
# a growmap of Sequoia
treeopt import growmap.pt
# the built-in model with a published tree
treeopt validate --tree mc_sim_7b_63 --limit 8
# exit with 6 below a speedup
treeopt validate --heads FasterDecoding/medusa-vicuna-7b-v1.3 --tree tree.yaml --prompts alpaca_eval --min-speedup 1.5
# all methods on the built-in model
treeopt compare --svg methods.svg
# some methods on your model and prompts
treeopt compare --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --methods lookup,ngram --svg methods.svg
# the built-in model with its heads
treeopt generate "Once upon a time" --tree mc_sim_7b_63
# a prompt from a pipe, sampled
treeopt generate - --model Qwen/Qwen3-0.6B --drafter drafter.safetensors --acceptance sample --seed 1
# answers to prompts
treeopt distill --model Qwen/Qwen3-0.6B --prompts prompts.jsonl -o answers.jsonl
# conversations that the model writes alone
treeopt distill --model Qwen/Qwen3-0.6B --self-talk 1000 -o talks.jsonl
# five heads
treeopt train --model Qwen/Qwen3-0.6B --data answers.jsonl -o heads
# heads and a LoRA adapter, from these heads on
treeopt train --model Qwen/Qwen3-0.6B --stage 2 --heads heads --data answers.jsonl -o stage2
# heads of the hub
treeopt heads show FasterDecoding/medusa-vicuna-7b-v1.3
# heads in a folder, for a program
treeopt heads show heads --json
# for vLLM
treeopt heads convert heads --for vllm -o heads-vllm
# with the LM head of the base model
treeopt heads convert heads --for tgi --model Qwen/Qwen3-0.6B --with-lm-heads -o heads-tgi
# the names that can be given
treeopt list
# for a program
treeopt list --json
# a published tree
treeopt show mc_sim_7b_63
# replayed over traces
treeopt show tree.yaml --calibration calibration.safetensors
# is the tree what its calibration gives?
treeopt reproduce tree.yaml
# the prompts are elsewhere now
treeopt reproduce calibration.safetensors --map prompts.jsonl=data/prompts.jsonl
"""


def _by_command() -> dict[str, list[tuple[str, str]]]:
    """The examples of each command; those of `heads` are the first of its two commands."""
    found: dict[str, list[tuple[str, str]]] = {}
    lines = _LINES.strip().splitlines()
    for what, line in zip(lines[::2], lines[1::2], strict=True):
        words = line.split()[1:3]
        name = " ".join(words if words[0] == "heads" else words[:1])
        found.setdefault(name, []).append((what.removeprefix("# "), line))
    return {**found, "heads": [found["heads show"][0], found["heads convert"][0]]}


EXAMPLES = _by_command()
