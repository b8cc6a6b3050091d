"""The public names of `treeopt`. lazy_loader reads this list at import, type checkers read it as a stub."""

from .calibrate.pipeline import run_calibration as run_calibration
from .calibration import Calibration as Calibration
from .decode.decoder import TreeDecoder as TreeDecoder
from .decode.generate import tree_generate as tree_generate
from .decode.rules import Greedy as Greedy
from .decode.rules import Sample as Sample
from .decode.rules import Typical as Typical
from .drafter import Drafter as Drafter
from .drafting.learn import Learning as Learning
from .errors import TreeoptError as TreeoptError
from .evaluate.compare import compare as compare
from .evaluate.learn_drafter import LearnedDrafter as LearnedDrafter
from .evaluate.learn_drafter import learn_drafter as learn_drafter
from .evaluate.profile import measure_profile as measure_profile
from .evaluate.validate import validate as validate
from .files.calibrations import load_calibration as load_calibration
from .files.calibrations import save_calibration as save_calibration
from .files.drafters import load_drafter as load_drafter
from .files.drafters import save_drafter as save_drafter
from .files.policies import load_plan as load_plan
from .files.policies import save_policy as save_policy
from .files.profiles import load_profile as load_profile
from .files.trees import load_tree as load_tree
from .files.trees import save_tree as save_tree
from .latency import LatencyProfile as LatencyProfile
from .models.base import load_base as load_base
from .models.heads import MedusaHeads as MedusaHeads
from .models.layouts import load_heads as load_heads
from .models.layouts import save_heads as save_heads
from .optimize.per_step import build_policy as build_policy
from .optimize.per_step import replay_policy as replay_policy
from .optimize.replay import replay as replay
from .optimize.tree_builder import build_tree as build_tree
from .policy import TreePolicy as TreePolicy
from .texts.prompts import load_prompts as load_prompts
from .train.distill import distill as distill
from .train.medusa1 import train_heads as train_heads
from .train.settings import Settings as Settings
from .train.talks import SelfTalk as SelfTalk
from .tree import Tree as Tree
from .verify.buffer_files import load_buffers as load_buffers
from .verify.buffers import Buffers as Buffers
from .verify.buffers import compile_tree as compile_tree

__version__: str
