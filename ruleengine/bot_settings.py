"""The `bots` of engine.yaml: group bots of WeCom, DingTalk, Feishu and Lark."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Seconds, Strict
from gpuwarden.ruleengine.prometheus_settings import Url
from gpuwarden.ruleengine.texts.speeches import Language
from gpuwarden.ruleengine.web_settings import File


def _free(name: str) -> str:
    if name in ("email", "slack"):
        raise PydanticCustomError(
            "GW111", "{name} is a channel already: give the bot another name", {"name": name}
        )
    return name


BotName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$"), AfterValidator(_free)
]
"""Name of a bot; the receiver of alertmanager.yml names it in its address."""
SERVERS = {
    "wecom": "https://qyapi.weixin.qq.com",
    "dingtalk": "https://oapi.dingtalk.com",
    "feishu": "https://open.feishu.cn",
}
"""Where each kind of bot is reached; Lark's is https://open.larksuite.com."""


class BotSettings(Strict):
    """One bot in one group."""

    kind: Literal["wecom", "dingtalk", "feishu"]
    """Whose bot it is; Lark's is of the kind feishu, with its own url."""
    key_file: File
    """Holds the bot's key: what its webhook address ends with."""
    secret_file: File | None = None
    """Holds the secret that messages are signed with, where the bot demands it; not for wecom."""
    url: Url | None = None
    """The server, https://open.larksuite.com for Lark; that of its kind by default."""
    proves: StrictBool = False
    """Whether a message that mentions the owner in this group is a notice to the owner, so that its
    proof starts the deadline. A group is read by others, and by the owner only perhaps: no by
    default; mail or a direct message then has to prove it."""
    language: Language | None = None
    """Of what the group reads; the directory's by default."""
    timeout: Annotated[Seconds, Field(gt=0, le=60)] = 10.0
    """For one message."""

    @model_validator(mode="after")
    def _signed(self) -> BotSettings:
        if self.kind == "wecom" and self.secret_file is not None:
            raise PydanticCustomError(
                "GW111",
                "a wecom bot signs nothing: leave out secret_file",
                {"at": ("secret_file",)},
            )
        return self

    @property
    def server(self) -> str:
        """Base address of the server."""
        return self.url or SERVERS[self.kind]
