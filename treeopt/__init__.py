"""treeopt: measure draft heads, build the best tree for them, and decode with it, losslessly.

    from treeopt import compile_tree, load_tree
    buffers = compile_tree(load_tree("mc_sim_7b_63"))

Importing this package loads neither torch nor transformers. The public names are those of `__init__.pyi`; the module of
each is imported on first use.
"""

import lazy_loader

from treeopt.version import VERSION

__version__ = VERSION
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
