"""Small nodes that exercise the executor: links, hidden inputs, dynamic inputs, async execution."""

from comfyui_fasth3.nodes._host import io

FLAVOURS = ["plain", "salted"]


class Number(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Number", inputs=[io.Int.Input("value", default=1, min=0, max=10)], outputs=[io.Int.Output()]
        )

    @classmethod
    def execute(cls, value):
        return io.NodeOutput(value)


class Add(io.ComfyNode):
    """Async, with an optional input and a combo."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Add",
            inputs=[
                io.Int.Input("a"), io.Int.Input("b"), io.Int.Input("c", optional=True),
                io.Combo.Input("flavour", options=FLAVOURS, optional=True),
                io.Float.Input("scale", default=1.0, min=0.0, max=2.0, optional=True),
            ],
            outputs=[io.Int.Output(), io.String.Output()],
        )

    @classmethod
    async def execute(cls, a, b, c=0, flavour="plain", scale=1.0):
        return io.NodeOutput(a + b + c, flavour)


class Mixer(io.ComfyNode):
    """Inputs that depend on a choice, with dotted names in the graph."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Mixer",
            inputs=[
                io.DynamicCombo.Input("kind", options=[
                    io.DynamicCombo.Option("off", []),
                    io.DynamicCombo.Option("tuned", [io.Int.Input("strength", min=0, max=9)]),
                ]),
            ],
            outputs=[io.String.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, kind):
        return io.NodeOutput(str(sorted(kind.items())))


class Show(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="Show", inputs=[io.Int.Input("number"), io.String.Input("text", optional=True)],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt], is_output_node=True,
        )

    @classmethod
    def execute(cls, number, text=""):
        said = f"{cls.hidden.unique_id}: {number} {text} of {len(cls.hidden.prompt)}"
        return io.NodeOutput(ui={"text": (said,)})


class Fail(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="Fail", inputs=[io.Int.Input("number")], is_output_node=True)

    @classmethod
    def execute(cls, number):
        raise ValueError(f"no {number} today")


CLASSES = {cls.GET_SCHEMA().node_id: cls for cls in (Number, Add, Mixer, Show, Fail)}
