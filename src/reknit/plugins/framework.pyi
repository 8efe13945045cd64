"""The names that the adapter of a framework may import; `framework.py` imports each one when it is used."""

from reknit.frameworks.custom import CustomFramework as CustomFramework
from reknit.frameworks.custom import Held as Held
from reknit.frameworks.custom import Value as Value
from reknit.frameworks.custom import register_framework as register_framework
from reknit.frameworks.training_job import TrainingJob as TrainingJob
from reknit.frameworks.walk import Adapter as Adapter
from reknit.frameworks.walk.load_walk import Loading as Loading
from reknit.frameworks.walk.save_walk import Saving as Saving
from reknit.frameworks.walk.walk import Arrays as Arrays
from reknit.frameworks.walk.walk import Place as Place
from reknit.frameworks.walk.walk import View as View
from reknit.frameworks.walk.walk import Walk as Walk
from reknit.frameworks.walk.walk import World as World
from reknit.plugins import Framework as Framework
from reknit.types.box import Box as Box
from reknit.types.shard import TensorSpec as TensorSpec
