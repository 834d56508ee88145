// Let the search work where the site is opened from a folder, where browsers start no worker:
// run the worker's script in a hidden frame, which has a scope of its own as well.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.started = new Promise((resolve) => {
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(scope);
        scope.document.body.append(script);
      });
    }
    postMessage(data) {
      this.started.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
