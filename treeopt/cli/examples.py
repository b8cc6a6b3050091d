"""The examples at the end of each command's help: the command, and what it does.

A test parses every command line by click's own parser of its command.
"""

_LINES = """
treeopt demo  # all steps on the built-in model, offline
treeopt demo -o first-run --json  # in another folder, and the results for a program
treeopt doctor  # is everything there?
treeopt doctor --json  # for a program; the exit status is 4 where it cannot be used
treeopt doctor --draft pocket-eagle3  # is this drafter wired as it was trained?
treeopt calibrate --heads FasterDecoding/medusa-vicuna-7b-v1.3 --prompts alpaca_eval  # Medusa's heads name their base
treeopt calibrate --model Qwen/Qwen3-0.6B --prompts prompts.jsonl  # without heads: an n-gram drafter is learned too
treeopt learn --model Qwen/Qwen3-0.6B --prompts prompts.jsonl  # a drafter for a model without heads
treeopt learn --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts alpaca_eval  # with a smaller model as draft model
treeopt merge calibration.0-of-2.safetensors calibration.1-of-2.safetensors  # shards of `treeopt calibrate --shard`
treeopt merge code.safetensors chat.safetensors -o both.safetensors  # calibrations of other prompts
treeopt report --calibration calibration.safetensors --tree tree.yaml  # of a tree and its traces
treeopt report --validation validate.json --decoding generate.json -o text.html  # of results of --json
treeopt profile --heads FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16  # the default sizes, on this machine
treeopt profile --drafter drafter.safetensors --kind dynamic  # per-step trees of a learned drafter
treeopt build --nodes 64 -o tree.yaml  # 64 nodes, from calibration.safetensors
treeopt build --nodes auto --profile profile.yaml -o fastest.yaml  # the fastest size on this machine
treeopt build --nodes 32 --for trtllm -o trtllm.yaml  # under the limits of an engine
treeopt curve --largest 128  # tokens per step by nodes
treeopt curve --profile profile.yaml -o speedup.svg  # with overhead and speedup
treeopt plan --model vicuna-7b --device-preset a100-80gb-pcie --num-heads 5  # a model on a device that you do not have
treeopt plan --model llama-2-7b --device-spec flops=312e12,bandwidth=1935e9 --batch-size 1,8  # a device by its figures
treeopt compile mc_sim_7b_63 -o mc_sim.safetensors  # a published tree
treeopt compile tree.yaml  # a tree that was built
treeopt render tree.yaml -o tree.svg  # as SVG
treeopt render tree.yaml --example "Once upon a time" -o step.svg  # one decoding step, with its tokens
treeopt export tree.yaml --for medusa -o choices.py  # a tree for Medusa
treeopt export --for vllm --calibration calibration.safetensors --profile profile.yaml  # settings of vLLM, from traces
treeopt import choices.py -o tree.yaml  # a list of paths
treeopt import growmap.pt  # a growmap of Sequoia
treeopt validate --tree mc_sim_7b_63 --limit 8  # the built-in model with a published tree
treeopt validate --heads heads --tree tree.yaml --prompts alpaca_eval --min-speedup 1.5  # exit with 6 below a speedup
treeopt compare --svg methods.svg  # all methods on the built-in model
treeopt compare --model Qwen/Qwen3-0.6B --prompts prompts.jsonl --methods lookup,ngram  # some methods on your model
treeopt generate "Once upon a time" --tree mc_sim_7b_63  # the built-in model with its heads
treeopt generate - --drafter drafter.safetensors --acceptance sample --seed 1  # a prompt from a pipe, sampled
treeopt distill --model Qwen/Qwen3-0.6B --prompts prompts.jsonl -o answers.jsonl  # answers to prompts
treeopt distill --model Qwen/Qwen3-0.6B --self-talk 1000 -o talks.jsonl  # conversations that the model writes alone
treeopt train --model Qwen/Qwen3-0.6B --data answers.jsonl -o heads  # five heads
treeopt train --stage 2 --heads heads --data answers.jsonl -o stage2  # a LoRA adapter, and heads that start from these
treeopt heads show FasterDecoding/medusa-vicuna-7b-v1.3  # heads of the hub
treeopt heads show heads --json  # heads in a folder, for a program
treeopt heads convert heads --for vllm -o heads-vllm  # for vLLM
treeopt heads convert heads --for tgi --model MODEL --with-lm-heads -o heads-tgi  # with the LM head of the base model
treeopt list  # the names that can be given
treeopt list --json  # for a program
treeopt show mc_sim_7b_63  # a published tree
treeopt show tree.yaml --calibration calibration.safetensors  # replayed over traces
treeopt reproduce tree.yaml  # is the tree what its calibration gives?
treeopt reproduce calibration.safetensors --map prompts.jsonl=data/prompts.jsonl  # the prompts are elsewhere now
"""


def _by_command() -> dict[str, list[tuple[str, str]]]:
    """The examples of each command."""
    found: dict[str, list[tuple[str, str]]] = {}
    for example in _LINES.strip().splitlines():
        line, what = example.split("  # ")
        _, *words = line.split()[:3]
        name = " ".join(words if words[0] == "heads" else words[:1])
        found.setdefault(name, []).append((what, line))
    return found


EXAMPLES = _by_command()
