"""The floor under any FastAPI service: a route that sends the body back."""

from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.post("/attend")
async def echo(request: Request) -> Response:
    return Response(await request.body())
