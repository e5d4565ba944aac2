/*
 * A worker in a hidden frame, for pages that are opened from disk, where browsers do not start workers.
 * The search of the theme runs in it. On a server this file does nothing.
 */
(function () {
  "use strict";
  if (window.location.protocol !== "file:") return;

  function load(frame, url) {
    return new Promise(function (resolve, reject) {
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      frame.contentDocument.body.appendChild(script);
    });
  }

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = this.onerror = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write("<!doctype html><title>worker</title><body></body>");
      page.close();
      const scope = this.frame.contentWindow;
      scope.postMessage = (data) => this.emit(new MessageEvent("message", { data: data }));
      scope.importScripts = (...urls) => Promise.all(urls.map((part) => load(this.frame, new URL(part, url))));
      this.ready = load(this.frame, url).catch(() => this.emit(new ErrorEvent("error")));
    }

    emit(event) {
      this.dispatchEvent(event);
      const listener = this["on" + event.type];
      if (listener) listener.call(this, event);
    }

    postMessage(data) {
      this.ready.then(() => {
        const scope = this.frame.contentWindow;
        const event = new scope.MessageEvent("message", { data: data });
        scope.dispatchEvent(event);
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
})();
