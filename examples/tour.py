"""A tour of treeopt in cells. Run it as a script, or cell by cell in an editor that knows `# %%`.

python examples/tour.py
python examples/tour.py --model MODEL
"""

# %% [markdown]
# A tree is a set of paths of ranks. `(0,)` is the drafter's best guess of the next token, `(0, 1)` the second guess of
# the token after that. All nodes are verified in one forward pass of the model.

# %%
import sys

import treeopt

MODEL = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else "pocket"
tree = treeopt.Tree(((0,), (1,), (0, 0)))
print("nodes, the root among them:", tree.nodes)
buffers = treeopt.compile_tree(tree)
print("each node sees its ancestors and itself:")
print(buffers.attention_mask.int())

# %% [markdown]
# A model and a drafter. `pocket` comes with five Medusa heads. Another model drafts here from its own text so far.

# %%
base = treeopt.load_base(MODEL)
heads = treeopt.load_heads("pocket") if MODEL == "pocket" else None
prompts = treeopt.load_prompts("pocket", limit=8)

# %% [markdown]
# Calibration: the model answers the prompts, and each token of an answer gets its rank among the drafter's guesses.

# %%
learning = None if heads else treeopt.Learning(tokens=0)  # no heads: no text is sampled, nothing is counted
run = treeopt.run_calibration(base, heads, prompts, max_new_tokens=48, learning=learning)
calibration = run.calibration
print("texts and levels:", calibration.sequences, calibration.num_heads)
print("the ranks of some positions, a column a level (0: the best guess was right):")
print(calibration.ranks[20:28])

# %% [markdown]
# Replay: the steps of a decoder, counted on these ranks without running the model. A larger tree takes fewer steps.

# %%
for nodes in (2, 4, 8, 16, 32, 64):
    best = treeopt.build_tree(calibration, nodes)
    print(f"{nodes:3} nodes: {treeopt.replay(best, calibration).tokens_per_step:.3f} tokens per step")

# %% [markdown]
# Decoding with a tree gives the text of stock `generate` in fewer steps.

# %%
tree = treeopt.build_tree(calibration, 16)
drafter = run.learned.drafter if run.learned else None
decoder = treeopt.TreeDecoder(base, heads.heads if heads else None, tree, drafter=drafter)
text = run.texts[0]
decoded = decoder.generate(text.prompt, len(text.answer))
print("tokens of each step:", decoded.step_lengths)
print("the text of the calibration, which stock generate wrote:", decoded.tokens == text.answer)
assert base.tokenizer is not None
print(base.tokenizer.decode(decoded.tokens))
