"""Programs of the libraries that agents use. Arguments: the addresses of two servers; output: one line of JSON."""

# ruff: noqa: E501 - programs in other languages

OPENAI = """
import json, sys
from typing import Literal
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field
plain, scripted = (OpenAI(base_url=url, api_key="none", max_retries=0).chat.completions for url in sys.argv[1:])
class weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
def ask(name): return dict(model="tiny", messages=[{"role": "user", "content": f"@{name} the weather?"}], max_tokens=400)
out = {}
out["parse"] = plain.parse(response_format=weather, **ask("x")).choices[0].message.parsed.model_dump()
tool = pydantic_function_tool(weather)
call = plain.parse(tools=[tool], tool_choice="required", **ask("x")).choices[0].message.tool_calls[0]
out["parsed call"] = call.function.parsed_arguments.model_dump()
with plain.stream(response_format=weather, **ask("x")) as stream:
    out["events"] = sorted({event.type for event in stream})
    out["streamed"] = stream.get_final_completion().choices[0].message.parsed.model_dump()
first = scripted.create(tools=[tool], **ask("two"))
message = first.choices[0].message
out["reason"] = first.choices[0].finish_reason
out["calls"] = [json.loads(c.function.arguments) for c in message.tool_calls]
with scripted.stream(tools=[tool], **ask("call")) as stream:
    done = stream.get_final_completion().choices[0].message
out["said"], out["streamed call"] = done.content, done.tool_calls[0].function.parsed_arguments.model_dump()
results = [{"role": "tool", "tool_call_id": c.id, "content": "rain"} for c in message.tool_calls]
again = ask("two")
again["messages"] += [message, *results]
out["after"] = scripted.create(tools=[tool], **again).choices[0].message.content
thought = scripted.create(**ask("think"))
said, counts = thought.choices[0].message, thought.usage.completion_tokens_details
out["reasoning"] = [said.reasoning, said.content, counts.reasoning_tokens > 0]
both = scripted.parse(tools=[tool], response_format=weather, **ask("two")).choices[0].message
out["call in place of the format"] = [c.function.parsed_arguments.model_dump() for c in both.tool_calls]
out["format in place of a call"] = scripted.parse(
    tools=[tool], response_format=weather, **ask("json")).choices[0].message.parsed.model_dump()
print(json.dumps(out))
"""

LITELLM = """
import json, sys
from typing import Literal
import litellm
from pydantic import BaseModel, Field
plain, scripted = ({"api_base": url, "api_key": "none"} for url in sys.argv[1:])
class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
def ask(name): return dict(messages=[{"role": "user", "content": f"@{name} the weather?"}], max_tokens=400)
tools = [{"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}]
out = {}
for name in ("hosted_vllm/tiny", "openai/tiny"):
    one = litellm.completion(model=name, response_format=Weather, **ask("x"), **plain)
    out[name + " schema"] = Weather.model_validate_json(one.choices[0].message.content).model_dump()
    one = litellm.completion(model=name, tools=tools, tool_choice="required", **ask("x"), **plain)
    call = one.choices[0].message.tool_calls[0].function
    given = json.loads(call.arguments)  # litellm 1.110 sends hosted_vllm no additionalProperties: others may come
    out[name + " required"] = Weather.model_validate({k: given[k] for k in ("city", "days")}).model_dump()
    one = litellm.completion(model=name, tools=tools, **ask("two"), **scripted)
    out[name + " auto"] = [json.loads(c.function.arguments) for c in one.choices[0].message.tool_calls]
    chunks = list(litellm.completion(model=name, tools=tools, stream=True, **ask("two"), **scripted))
    whole = litellm.stream_chunk_builder(chunks)
    out[name + " streamed"] = [json.loads(c.function.arguments) for c in whole.choices[0].message.tool_calls]
    thought = litellm.completion(model=name, **ask("think"), **scripted).choices[0].message
    out[name + " reasoning"] = [thought.reasoning_content, thought.content]
print(json.dumps(out))
"""

LANGCHAIN = """
import json, sys
from typing import Literal
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
plain, scripted = (ChatOpenAI(model="tiny", base_url=url, api_key="none", max_tokens=400, max_retries=0)
                   for url in sys.argv[1:])
class Weather(BaseModel, extra="forbid"):
    '''The weather.'''
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
@tool
def weather(city: str, days: int) -> str:
    '''Return the weather.'''
    return f"rain in {city}"
out = {}
for method in ("json_schema", "function_calling"):
    for strict in (None, True):
        out[f"{method} {strict}"] = plain.with_structured_output(Weather, method=method, strict=strict).invoke("x").model_dump()
out["default"] = plain.with_structured_output(Weather).invoke("x").model_dump()
out["json_mode"] = scripted.with_structured_output(Weather, method="json_mode").invoke("@json as JSON").model_dump()
bound = scripted.bind_tools([weather])
question = HumanMessage("@two the weather?")
answer = bound.invoke([question])
out["calls"] = [c["args"] for c in answer.tool_calls]
results = [weather.invoke(c) for c in answer.tool_calls]
out["after"] = bound.invoke([question, answer, *results]).content
whole = None
for chunk in bound.stream([question]):
    whole = chunk if whole is None else whole + chunk
out["streamed"] = [c["args"] for c in whole.tool_calls]
forced = plain.bind_tools([Weather], tool_choice="any").invoke("x").tool_calls[0]["args"]
out["required"] = Weather(**forced).model_dump()
print(json.dumps(out))
"""

LLAMA_INDEX = """
import json, sys
from typing import Literal
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
def model(url, **more):
    return OpenAILike(model="tiny", api_base=url, api_key="none", is_chat_model=True, max_tokens=400, max_retries=0,
                      is_function_calling_model=True, **more)
plain, scripted = map(model, sys.argv[1:])
class Weather(BaseModel, extra="forbid"):
    '''The weather.'''
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
def weather(city: str, days: int) -> str:
    '''Return the weather.'''
    return f"rain in {city} for {days}"
out = {}
out["structured"] = plain.structured_predict(Weather, PromptTemplate("x")).model_dump()
out["as structured"] = plain.as_structured_llm(Weather).chat([ChatMessage("x")]).raw.model_dump()
native = model(sys.argv[1], should_use_structured_outputs=True)
out["native"] = native.structured_predict(Weather, PromptTemplate("x")).model_dump()
tool = FunctionTool.from_defaults(weather)
found = scripted.chat_with_tools([tool], user_msg="@two the weather?", allow_parallel_tool_calls=True)
out["calls"] = [c.tool_kwargs for c in scripted.get_tool_calls_from_response(found)]
out["called"] = str(scripted.predict_and_call([tool], user_msg="@call the weather?"))
last = None
for last in scripted.stream_chat_with_tools([tool], user_msg="@two the weather?", allow_parallel_tool_calls=True):
    pass
out["streamed"] = [c.tool_kwargs for c in scripted.get_tool_calls_from_response(last)]
print(json.dumps(out))
"""

INSTRUCTOR = """
import json, sys
from typing import Literal
import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
plain, scripted = (OpenAI(base_url=url, api_key="none", max_retries=0) for url in sys.argv[1:])
class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
def ask(client, mode, name, **more):
    made = instructor.from_openai(client, mode=mode)
    return made.chat.completions.create(model="tiny", response_model=Weather, max_retries=0, max_tokens=400,
        messages=[{"role": "user", "content": f"@{name} the weather?"}], **more)
out = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    out[mode.name] = ask(plain, mode, "x").model_dump()
for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
    out[mode.name] = ask(scripted, mode, "json").model_dump()
made = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
last = None
for last in made.chat.completions.create_partial(
        model="tiny", response_model=Weather, max_tokens=400, messages=[{"role": "user", "content": "x"}]):
    pass
out["partial"] = last.model_dump()
print(json.dumps(out))
"""

PYDANTIC_AI = """
import asyncio, json, sys
from typing import Literal
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
plain, scripted = (OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
                   for url in sys.argv[1:])
class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=0, le=9)
settings = {"max_tokens": 400}
out = {}
for name, model, kind in (("output_type", plain, Weather), ("tool output", plain, ToolOutput(Weather)),
                          ("native", plain, NativeOutput(Weather)), ("prompted", scripted, PromptedOutput(Weather))):
    out[name] = Agent(model, output_type=kind, model_settings=settings).run_sync("@json").output.model_dump()
agent, called = Agent(scripted, model_settings=settings), []
@agent.tool_plain
def weather(city: str, days: int) -> str:
    called.append({"city": city, "days": days})
    return "rain"
out["after"] = agent.run_sync("@two the weather").output
out["calls"], called = sorted(called, key=str), []
async def streamed():
    async with agent.run_stream("@two the weather") as run:
        return "".join([text async for text in run.stream_text(delta=True)])
out["streamed"] = asyncio.run(streamed())
print(json.dumps(out))
"""

NODE_OPENAI = """
import OpenAI from 'openai';
import {zodResponseFormat, zodFunction} from 'openai/helpers/zod';
import {z} from 'zod';
const [plain, scripted] = process.argv.slice(2).map(
  baseURL => new OpenAI({baseURL, apiKey: 'none', maxRetries: 0}).chat.completions);
const Weather = z.object({city: z.enum(['Paris', 'Oslo']), days: z.number().int().min(0).max(9)});
const ask = name => ({model: 'tiny', messages: [{role: 'user', content: `@${name} the weather?`}], max_tokens: 400});
const out = {}, called = [];
const format = zodResponseFormat(Weather, 'weather');
out.parse = (await plain.parse({...ask('x'), response_format: format})).choices[0].message.parsed;
out.streamed = (await plain.stream({...ask('x'), response_format: format}).finalChatCompletion()).choices[0].message.parsed;
const tool = zodFunction({name: 'weather', parameters: Weather, function: args => { called.push(args); return 'rain'; }});
const forced = await plain.parse({...ask('x'), tools: [tool], tool_choice: 'required'});
out.required = forced.choices[0].message.tool_calls[0].function.parsed_arguments;
out.after = await scripted.runTools({...ask('two'), tools: [tool]}).finalContent();
out.calls = called;
const whole = await scripted.stream({...ask('two'), tools: [tool]}).finalChatCompletion();
out.streamedCalls = whole.choices[0].message.tool_calls.map(c => JSON.parse(c.function.arguments));
console.log(JSON.stringify(out));
"""

NODE_AI = """
import {generateObject, generateText, streamObject, streamText, stepCountIs, tool, Output} from 'ai';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {z} from 'zod';
const [plain, scripted] = process.argv.slice(2).map(baseURL =>
  createOpenAICompatible({name: 'lamina', baseURL, apiKey: 'none', supportsStructuredOutputs: true})('tiny'));
const loose = createOpenAICompatible({name: 'lamina', baseURL: process.argv[3], apiKey: 'none'})('tiny');
const schema = z.object({city: z.enum(['Paris', 'Oslo']), days: z.number().int().min(0).max(9)});
const out = {}, called = [], same = {maxOutputTokens: 400, maxRetries: 0};
out.object = (await generateObject({model: plain, schema, prompt: 'x', ...same})).object;
const objects = streamObject({model: plain, schema, prompt: 'x', ...same});
for await (const part of objects.partialObjectStream) out.streamedObject = part;
out.jsonMode = (await generateObject({model: loose, schema, prompt: '@json', ...same})).object;
const weather = tool({description: 'w', inputSchema: schema, execute: async x => { called.push(x); return 'rain'; }});
const forced = await generateText({model: plain, tools: {weather}, toolChoice: 'required', prompt: 'x', ...same});
out.required = forced.toolCalls[0].input;
called.length = 0;
const loop = {model: scripted, tools: {weather}, prompt: '@two', stopWhen: stepCountIs(3), ...same};
out.after = (await generateText(loop)).text;
out.calls = called.splice(0);
const stream = streamText(loop);
let text = '';
for await (const part of stream.textStream) text += part;
out.streamed = text;
out.streamedCalls = called;
out.reasoning = (await generateText({model: scripted, prompt: '@think', ...same})).reasoningText;
out.output = (await generateText({model: plain, output: Output.object({schema}), prompt: 'x', ...same})).output;
console.log(JSON.stringify(out));
"""
