from mixle_mymodel.model import Block

from mixle_core.testing import PluginConformance


class TestMyModel(PluginConformance):
    plugin_name = "mymodel"
    beside = ("dtensor-tp",)

    def make_model(self):
        return Block()
