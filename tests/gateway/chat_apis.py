"""What the tests of the three chat APIs share: a template that shows what it gets, tools, and an answer with calls."""

from __future__ import annotations

from typing import Any

from msaserve.gateway.chat import ChatTemplate

NS = "]<]minimax[>["
_TEMPLATE = """
{%- macro xml(value) -%}
  {%- if value is mapping -%}
    {%- for k, v in value.items() if v is not none -%}
      ]<]minimax[>[<{{ k }}>{{ xml(v) }}]<]minimax[>[</{{ k }}>
    {%- endfor -%}
  {%- elif value is string -%}{{ value }}{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
]~!b[
{%- if tools %}tools:{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages -%}
]~b]{{ m.role }}:
{%- if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}</mm:think>{% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] -%}
]<]minimax[>[<invoke name="{{ call.function.name }}">{{ xml(call.function.arguments) }}]<]minimax[>[</invoke>
{%- endfor -%}
[e~[
{%- endfor -%}
{%- if add_generation_prompt -%}
]~b]ai:
{%- if thinking_mode == 'enabled' -%}<mm:think>{%- elif thinking_mode == 'disabled' -%}</mm:think>{%- endif -%}
{%- endif -%}
"""
TEMPLATE = ChatTemplate(_TEMPLATE)
PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
"""Of the tool `weather`; `clock` has none."""


def call(name: str, **arguments: Any) -> str:
    inside = "".join(f"{NS}<{key}>{value}{NS}</{key}>" for key, value in arguments.items())
    return f'{NS}<invoke name="{name}">{inside}{NS}</invoke>'


TWO_CALLS = f"{NS}<tool_call>\n{call('weather', city='Köln', days=2)}\n{call('clock')}\n{NS}</tool_call>"
FULL = f"<mm:think>look it up</mm:think>One moment.{TWO_CALLS}"
