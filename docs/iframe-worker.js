// Browsers start no worker for a page of a folder, and the search is one: there, a hidden frame runs the worker's script.
// As between threads, messages are copies and arrive later.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(script) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = data => this.later(() => this.onmessage?.({data: structuredClone(data)}));
      this.frame.srcdoc = `<script>postMessage = frameElement.answer</script><script src="${script}"></script>`;
      this.loaded = new Promise(resolve => (this.frame.onload = resolve));
      document.body.append(this.frame);
    }
    postMessage(data) {
      const message = new MessageEvent("message", {data: structuredClone(data)});
      this.later(() => this.frame.contentWindow?.dispatchEvent(message));
    }
    later(call) {
      this.loaded.then(() => setTimeout(call));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
