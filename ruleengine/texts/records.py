"""What engine, agents and servers have written down, told in the language of a reader. Pure.

Records are in English whoever reads them, and begin with words that stay the same. A reader of
another language is told what these words mean, and gets the record itself as a quotation.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.texts.speeches import Language, Speech

RECORDS: Final[Language] = "en"
"""The language of records."""

_CODE = re.compile(r"(?<![\w.-])[a-z]+(?:_[a-z]+)*(?![\w.-])")

MEANINGS: Final[Mapping[Language, Mapping[str, str]]] = MappingProxyType(
    {
        "zh": MappingProxyType(
            {
                "survivors": "仍有进程没有退出",
                "still_listed": "驱动仍列出已经结束的进程",
                "nvml": "驱动无法说明进程是否已经退出",
                "processes": "无法查看该任务的进程",
                "rebooted": "节点期间重新启动过",
                "restarted": "节点上的 agent 期间重新启动过",
                "unproven": "没有驱动给出的证明",
                "platform_silent": "其所在平台没有说明结果",
                "still_running": "其所在平台称任务仍在运行",
                "still_ending": "其所在平台称任务仍在结束过程中",
                "returned": "任务结束后又重新出现",
                "not_returned": "任务没有重新排队",
                "node_lost": "控制器无法联系其所在节点",
                "blocked_by_finalizer": "有 finalizer 阻止删除",
                "overdue": "任务超过宽限时间仍未结束",
                "disruption_budget": "中断预算不允许现在结束",
                "forbidden": "引擎没有所需的权限",
                "target_changed": "该任务已经变成另一次运行",
                "gone": "该任务已经不在",
                "withheld": "有人或某项设置在此期间阻止了结束",
                "lapsed": "请求已过期，没有被接受",
                "unheeded": "任务没有按请求退出",
                "incomplete": "结束没有得到证实",
                "failed": "节点上的 agent 出错",
                "refused": "节点上的 agent 拒绝了请求",
            }
        )
    }
)
"""Language -> a word that stays the same -> what it means."""

ERRORS: Final[Mapping[Language, Mapping[str, str]]] = MappingProxyType(
    {
        "zh": MappingProxyType(
            {
                "the directory has no address": "目录中没有地址",
                "they have left": "该用户已经离开",
                "the try was cancelled": "发送被中断",
                "its server asks to be left alone": "服务器要求稍后再试",
                "the mail server refused": "邮件服务器拒绝了收件人",
                "the mail server": "邮件服务器没有接收",
                "Slack does not answer": "Slack 没有应答",
                "Slack": "Slack 没有接收",
                "wecom": "企业微信没有接收",
                "dingtalk": "钉钉没有接收",
                "feishu": "飞书没有接收",
                "lark": "飞书没有接收",
            }
        )
    }
)
"""Language -> how an error of a delivery begins -> what it means; the first that fits."""
_OTHER: Final[Mapping[Language, str]] = MappingProxyType({"zh": "原因见记录"})


def reason(text: str, speech: Speech) -> str:
    """Why a decision ended as it did.

    Args:
        text: as the engine or an agent has written it.
        speech: the language.
    """
    if speech.language == RECORDS:
        return text
    known = MEANINGS[speech.language]
    found = dict.fromkeys(known[word] for word in _CODE.findall(text) if word in known)
    return _quoted(found, text, speech)


def errors(texts: Iterable[str], speech: Speech) -> str:
    """Why no server took a message; empty where there is no reason.

    Args:
        texts: as they were written down.
        speech: the language.
    """
    found = list(texts)
    if speech.language == RECORDS or not found:
        return speech.phrases.semicolon.join(found)
    begins = ERRORS[speech.language]
    return speech.phrases.semicolon.join(
        _quoted([m for begin, m in begins.items() if text.startswith(begin)][:1], text, speech)
        for text in found
    )


def _quoted(meanings: Iterable[str], text: str, speech: Speech) -> str:
    told = speech.listed(list(meanings)) or _OTHER[speech.language]
    quotation = text.replace("`", "'")
    return speech.say(speech.phrases.record, meaning=told, record=quotation)
