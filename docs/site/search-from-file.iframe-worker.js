// Browsers start no worker on a page that is opened as a file. There, the script of the search runs in a hidden frame,
// behind the interface of a worker. The theme's plugin `offline` looks for "iframe-worker" in the name of this file,
// and the script of the search for the class name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const deliver = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      const script = inside.document.createElement("script");
      script.src = new URL(address, location.href).href;
      script.onload = () => {
        this.deliver = deliver;
        this.waiting.forEach((data) => setTimeout(deliver, 0, data));
      };
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.deliver) setTimeout(this.deliver, 0, data);
      else this.waiting.push(data);
    }

    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
